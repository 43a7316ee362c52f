"""Open questions with answers of a few sentences, checked for the question's facts."""

from __future__ import annotations

from random import Random
from typing import Any

from sglang_dflash_lab.pairs.corpus import words
from sglang_dflash_lab.pairs.corpus.conversation import Example

_facts = Random(20240607)
_CITY_FACTS = {
    city: [_facts.sample(kind, 2) for kind in (words.FOODS, words.SIGHTS, words.MOODS)] for city in words.CITIES
}
_TOPIC_TIPS = {topic: _facts.sample(words.TIPS, 3) for topic in words.TOPICS}


def draw(rng: Random) -> Example:
    return rng.choice((_travel, _advice, _story, _compare))(rng)


def _example(kind: str, parameters: list[str], question: str, about: str, answer: str) -> Example:
    key = " ".join([kind, *parameters])
    return Example("chat", key, question, f"The question is about {about}.", answer, parameters)


def _travel(rng: Random) -> Example:
    city, month, name = rng.choice(words.CITIES), rng.choice(words.MONTHS), rng.choice(words.NAMES)
    foods, sights, moods = _CITY_FACTS[city]
    questions = (
        f"I am going to {city} in {month} with {name}. Any advice?",
        f"What should {name} see in {city} in {month}?",
        f"Tell {name} about {city} in {month}.",
    )
    question = rng.choice(questions)
    opening = rng.choice((f"{city} is {moods[0]} in {month}.", f"In {month}, {city} is a {moods[1]} place."))
    answer = (
        f"{opening} Start at the {sights[0]} in the morning and walk to the {sights[1]}. "
        f"For lunch, try the {foods[0]} or the {foods[1]}. Enjoy {city}, {name}!"
    )
    return _example("travel", [city, month, name], question, city, answer)


def _advice(rng: Random) -> Example:
    topic, minutes, day = rng.choice(words.TOPICS), rng.randint(2, 12) * 5, rng.choice(words.DAYS)
    questions = (f"How do I get better at {topic}?", f"Give me three tips about {topic}.")
    question = f"{rng.choice(questions)} I have {minutes} minutes every {day}."
    tips = "\n".join(f"{i}. {tip[0].upper()}{tip[1:]}." for i, tip in enumerate(_TOPIC_TIPS[topic], 1))
    opening = rng.choice((f"Here are three tips for {topic}:", f"Getting better at {topic} takes time:"))
    answer = f"{opening}\n{tips}\nYour {minutes} minutes every {day} are enough. Good luck!"
    return _example("advice", [topic, str(minutes), day], question, topic, answer)


def _story(rng: Random) -> Example:
    (first, second), place, thing = rng.sample(words.ANIMALS, 2), rng.choice(words.PLACES), rng.choice(words.OBJECTS)
    questions = (
        f"Tell me a short story about a {first} and a {second} in the {place} with a {thing}.",
        f"Write a story: a {first} finds a {thing} in the {place} and meets a {second}.",
    )
    question = rng.choice(questions)
    openings = (f"Once upon a time, a {first} lived in the {place}.", f"Long ago, the {place} was home to a {first}.")
    opening = rng.choice(openings)
    answer = (
        f"{opening} One morning the {first} found a {thing} near the water. A {second} came by and asked, "
        f'"Is that your {thing}?" The {first} gave it back, and the {first} and the {second} became friends. '
        f"The {place} was never quiet again."
    )
    return _example("story", [first, second, place, thing], question, f"a {first}", answer)


def _compare(rng: Random) -> Example:
    (first, second), day, name = rng.sample(words.TOPICS, 2), rng.choice(words.DAYS), rng.choice(words.NAMES)
    questions = (
        f"Which is better for {name} on {day}, {first} or {second}?",
        f"Should {name} spend {day} on {first} or on {second}?",
    )
    question = rng.choice(questions)
    opening = rng.choice((f"Both {first} and {second} are good.", "That depends on what you enjoy."))
    answer = (
        f"{opening} With {first}, it helps to {_TOPIC_TIPS[first][0]}. For {second}, {name} should "
        f"{_TOPIC_TIPS[second][1]}. On {day}, {name} could also try both."
    )
    return _example("compare", [first, second, day, name], question, first, answer)


def check(expected: Any, text: str) -> bool:
    return all(word in text for word in expected) and text.rstrip().endswith((".", "!"))
