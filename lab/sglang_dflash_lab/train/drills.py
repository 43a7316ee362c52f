"""Training-only tasks: words to copy and sums, so that the model learns both earlier."""

from __future__ import annotations

import json
from random import Random

from sglang_dflash_lab.pairs.corpus import words
from sglang_dflash_lab.pairs.corpus.conversation import Example
from sglang_dflash_lab.pairs.corpus.math_task import LARGEST

_CLASSES = {
    "name": words.NAMES,
    "item": words.ITEMS,
    "color": words.COLORS,
    "city": words.CITIES,
    "day": words.DAYS,
    "month": words.MONTHS,
    "food": words.FOODS,
    "topic": words.TOPICS,
    "animal": words.ANIMALS,
    "place": words.PLACES,
    "thing": words.OBJECTS,
}


def draw_words(rng: Random) -> Example:
    classes = rng.sample(tuple(_CLASSES), rng.randint(4, 8))
    drawn = {name: rng.choice(_CLASSES[name]) for name in classes}
    salad = " ".join(drawn.values())
    if rng.random() < 0.4:
        return Example("drill", salad, f"Repeat: {salad}", "I repeat the words.", salad, salad)
    rng.shuffle(classes)
    record = {name: drawn[name] for name in classes}
    question = f"Words: {salad}. Write a JSON record with the keys {', '.join(classes)}."
    key = f"{salad} -> {' '.join(classes)}"
    return Example("drill", key, question, f"The record has {len(classes)} keys.", json.dumps(record, indent=2), record)


def draw_sums(rng: Random) -> Example:
    """Return sums without a story, so that nearly every answer token needs arithmetic."""
    sums = [_sum(rng) for _ in range(rng.randint(6, 12))]
    asked = ", ".join(left for left, _ in sums)
    answer = "\n".join(f"{left} = {result}" for left, result in sums)
    return Example("sums", asked, f"Work out: {asked}", f"I work out {len(sums)} sums.", answer, answer)


def _sum(rng: Random) -> tuple[str, int]:
    kind = rng.choice("++--*")
    if kind == "*":
        a, b = rng.randint(2, 6), rng.randint(2, 9)
        return f"{a} * {b}", a * b
    if kind == "+":
        a = rng.randint(2, LARGEST - 2)
        b = rng.randint(2, LARGEST - a)
        return f"{a} + {b}", a + b
    a = rng.randint(4, LARGEST)
    b = rng.randint(2, a - 2)
    return f"{a} - {b}", a - b
