"""Facts of a sentence, written as a JSON record with the requested keys in order."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from sglang_dflash_lab.pairs.corpus import words
from sglang_dflash_lab.pairs.corpus.conversation import Example


def draw(rng: Random) -> Example:
    facts: dict[str, Any] = {
        "name": rng.choice(words.NAMES),
        "quantity": rng.randint(2, 99),
        "color": rng.choice(words.COLORS),
        "item": rng.choice(words.ITEMS),
    }
    sentence = f"{facts['name']} ordered {facts['quantity']} {facts['color']} {facts['item']}"
    price, city, day = rng.randint(2, 99), rng.choice(words.CITIES), rng.choice(words.DAYS)
    extras: list[tuple[str, Any, str]] = [
        ("price", price, f" for {price} dollars"),
        ("city", city, f" to be sent to {city}"),
        ("day", day, f" before {day}"),
    ]
    rng.shuffle(extras)
    for name, value, text in extras[: rng.randint(1, 3)]:
        facts[name] = value
        sentence += text
    keys = list(facts)
    rng.shuffle(keys)
    keys = keys[: rng.randint(3, len(keys))]
    record = {name: facts[name] for name in keys}
    return Example(
        task="json",
        key=f"{sentence} -> {' '.join(keys)}",
        question=f"{sentence}. Write a JSON record with the keys {', '.join(keys)}.",
        thought=f"The record has {len(keys)} keys: {', '.join(keys)}.",
        answer=json.dumps(record, indent=2),
        expected=record,
    )


def check(expected: Any, text: str) -> bool:
    try:
        record = json.loads(text)
    except json.JSONDecodeError:
        return False
    return isinstance(record, dict) and list(record.items()) == list(expected.items())
