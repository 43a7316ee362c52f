"""Open questions, answered in a few sentences; several wordings are right, so the check looks for facts."""

from __future__ import annotations

from random import Random
from typing import Any

from sglang_dflash.pairs.corpus.example import Example
from sglang_dflash.pairs.corpus.words import (
    ANIMALS,
    CITIES,
    DAYS,
    FOODS,
    MONTHS,
    MOODS,
    NAMES,
    OBJECTS,
    PLACES,
    SIGHTS,
    TIPS,
    TOPICS,
)

_facts = Random(20240607)
CITY_FACTS = {
    city: {
        "food": _facts.sample(FOODS, 2),
        "sight": _facts.sample(SIGHTS, 2),
        "mood": _facts.sample(MOODS, 2),
    }
    for city in CITIES
}
TOPIC_TIPS = {topic: _facts.sample(TIPS, 3) for topic in TOPICS}


def draw(rng: Random) -> Example:
    return rng.choice((_travel, _advice, _story, _compare))(rng)


def _example(key: str, question: str, about: str, answer: str, words: list[str]) -> Example:
    return Example("chat", key, question, f"The question is about {about}.", answer, words)


def _travel(rng: Random) -> Example:
    city, month, name = rng.choice(CITIES), rng.choice(MONTHS), rng.choice(NAMES)
    facts = CITY_FACTS[city]
    question = rng.choice(
        (
            f"I am going to {city} in {month} with {name}. Any advice?",
            f"What should {name} see in {city} in {month}?",
            f"Tell {name} about {city} in {month}.",
        )
    )
    first, second = facts["sight"]
    opening = rng.choice(
        (f"{city} is {facts['mood'][0]} in {month}.", f"In {month}, {city} is a {facts['mood'][1]} place.")
    )
    answer = (
        f"{opening} Start at the {first} in the morning and walk to the {second}. "
        f"For lunch, try the {facts['food'][0]} or the {facts['food'][1]}. Enjoy {city}, {name}!"
    )
    return _example(f"travel {city} {month} {name}", question, city, answer, [city, month, name])


def _advice(rng: Random) -> Example:
    topic, minutes, day = rng.choice(TOPICS), rng.randint(2, 12) * 5, rng.choice(DAYS)
    question = rng.choice(
        (
            f"How do I get better at {topic}? I have {minutes} minutes every {day}.",
            f"Give me three tips about {topic}. I have {minutes} minutes every {day}.",
        )
    )
    tips = "\n".join(f"{i}. {tip[0].upper()}{tip[1:]}." for i, tip in enumerate(TOPIC_TIPS[topic], 1))
    opening = rng.choice((f"Here are three tips for {topic}:", f"Getting better at {topic} takes time:"))
    answer = f"{opening}\n{tips}\nYour {minutes} minutes every {day} are enough. Good luck!"
    return _example(f"advice {topic} {minutes} {day}", question, topic, answer, [topic, str(minutes), day])


def _story(rng: Random) -> Example:
    (first, second), place, thing = rng.sample(ANIMALS, 2), rng.choice(PLACES), rng.choice(OBJECTS)
    question = rng.choice(
        (
            f"Tell me a short story about a {first} and a {second} in the {place} with a {thing}.",
            f"Write a story: a {first} finds a {thing} in the {place} and meets a {second}.",
        )
    )
    opening = rng.choice(
        (
            f"Once upon a time, a {first} lived in the {place}.",
            f"Long ago, the {place} was home to a {first}.",
        )
    )
    answer = (
        f"{opening} One morning the {first} found a {thing} near the water. A {second} came by and asked, "
        f'"Is that your {thing}?" The {first} gave it back, and the {first} and the {second} became friends. '
        f"The {place} was never quiet again."
    )
    return _example(
        f"story {first} {second} {place} {thing}",
        question,
        f"a {first}",
        answer,
        [first, second, place, thing],
    )


def _compare(rng: Random) -> Example:
    (first, second), day, name = rng.sample(TOPICS, 2), rng.choice(DAYS), rng.choice(NAMES)
    question = rng.choice(
        (
            f"Which is better for {name} on {day}, {first} or {second}?",
            f"Should {name} spend {day} on {first} or on {second}?",
        )
    )
    opening = rng.choice((f"Both {first} and {second} are good.", "That depends on what you enjoy."))
    answer = (
        f"{opening} With {first}, it helps to {TOPIC_TIPS[first][0]}. For {second}, {name} should "
        f"{TOPIC_TIPS[second][1]}. On {day}, {name} could also try both."
    )
    return _example(f"compare {first} {second} {day} {name}", question, first, answer, [first, second, day, name])


def check(expected: Any, text: str) -> bool:
    """True where the answer names every fact of the question and ends as a sentence."""
    return all(word in text for word in expected) and text.rstrip().endswith((".", "!"))
