"""Single- and multi-turn conversations of 20 to 1,500 tokens around the corpus's questions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from sglang_dflash.pairs.corpus.example import Example
from sglang_dflash.pairs.corpus.words import (
    ANIMALS,
    CITIES,
    COLORS,
    DAYS,
    FOODS,
    MOODS,
    NAMES,
    OBJECTS,
    PLACES,
    SIGHTS,
    TOPICS,
)

SHAPES = ("single", "turns", "document")
# 120 notes of about 10 tokens and three turns of at most 120 stay below 1,600 tokens
LONGEST_NOTES = 120

_NOTES: tuple[Callable[[Random], str], ...] = (
    lambda rng: f"{rng.choice(CITIES)} has a {rng.choice(MOODS)} {rng.choice(SIGHTS)}.",
    lambda rng: f"The {rng.choice(ANIMALS)} sleeps near the {rng.choice(PLACES)} on {rng.choice(DAYS)}.",
    lambda rng: f"{rng.choice(NAMES)} likes {rng.choice(FOODS)} and {rng.choice(TOPICS)}.",
    lambda rng: f"On {rng.choice(DAYS)}, {rng.choice(NAMES)} painted a {rng.choice(COLORS)} {rng.choice(OBJECTS)}.",
    lambda rng: f"In the {rng.choice(PLACES)} there is a {rng.choice(COLORS)} {rng.choice(OBJECTS)}.",
)


@dataclass(frozen=True)
class Conversation:
    """An optional system message and the turns; the last turn is the one to be answered."""

    system: str
    turns: tuple[Example, ...]
    thinking: bool = False

    def messages(self) -> list[dict[str, str]]:
        """Every message before the last answer, in the OpenAI chat form."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        turns = [
            {"role": role, "content": text}
            for turn in self.turns
            for role, text in (("user", turn.question), ("assistant", turn.answer))
        ]
        return system + turns[:-1]


def draw_conversation(rng: Random, shape: str, turn: Callable[[], Example], thinking: bool = False) -> Conversation:
    """A conversation of `shape`, its questions drawn by `turn`.

    `single` is one question; `turns` has two to six; `document` starts with a system message of 10 to
    `LONGEST_NOTES` notes that do not matter for the one to three questions after them.
    """
    count = {"single": 1, "turns": rng.randint(2, 6), "document": rng.choice((1, 1, 2, 3))}[shape]
    notes = rng.randint(10, LONGEST_NOTES) if shape == "document" else 0
    system = " ".join(["Notes:"] + [rng.choice(_NOTES)(rng) for _ in range(notes)]) if notes else ""
    return Conversation(system, tuple(turn() for _ in range(count)), thinking)
