"""Training only: random words to repeat or to sort into a record.

A small model learns to copy a question's words last, one class of words after the other. A drill is nothing but
copying, so the model learns it earlier.
"""

from __future__ import annotations

import json
from random import Random

from sglang_dflash.pairs.corpus import words
from sglang_dflash.pairs.corpus.conversation import Example

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


def draw(rng: Random) -> Example:
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
