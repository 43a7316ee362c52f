"""Questions with checkable answers, and conversations around them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from sglang_dflash_lab.pairs.corpus import words

SHAPES = ("single", "turns", "document")
# 120 notes of about 10 tokens and three turns of at most 120 stay below 1,600 tokens
LONGEST_NOTES = 120
HELDOUT_EVERY = 8


@dataclass(frozen=True)
class Example:
    """A question of one task.

    Attributes:
        key: canonical parameters of the question, without its wording.
        thought: text before the answer in thinking mode.
        expected: JSON value that ``check`` compares with.
    """

    task: str
    key: str
    question: str
    thought: str
    answer: str
    expected: Any

    @property
    def split(self) -> str:
        return split_of(f"{self.task}/{self.key}")


def split_of(key: str) -> str:
    """Return ``heldout`` for one key in ``HELDOUT_EVERY``, else ``train``, the same in every process."""
    digest = hashlib.blake2b(key.encode(), digest_size=4).digest()
    return "heldout" if int.from_bytes(digest, "big") % HELDOUT_EVERY == 0 else "train"


_NOTES = (
    ("{} has a {} {}.", (words.CITIES, words.MOODS, words.SIGHTS)),
    ("The {} sleeps near the {} on {}.", (words.ANIMALS, words.PLACES, words.DAYS)),
    ("{} likes {} and {}.", (words.NAMES, words.FOODS, words.TOPICS)),
    ("On {}, {} painted a {} {}.", (words.DAYS, words.NAMES, words.COLORS, words.OBJECTS)),
    ("In the {} there is a {} {}.", (words.PLACES, words.COLORS, words.OBJECTS)),
)


@dataclass(frozen=True)
class Conversation:
    """An optional system message and the turns, of which the last awaits its answer."""

    system: str
    turns: tuple[Example, ...]
    thinking: bool = False

    def messages(self) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        turns = [
            {"role": role, "content": text}
            for turn in self.turns
            for role, text in (("user", turn.question), ("assistant", turn.answer))
        ]
        return system + turns[:-1]


def draw_conversation(rng: Random, shape: str, turn: Callable[[], Example], thinking: bool = False) -> Conversation:
    """Return a conversation with questions drawn by ``turn``.

    ``single`` has one question, ``turns`` two to six; ``document`` has a system message of 10 to ``LONGEST_NOTES``
    irrelevant notes and one to three questions.
    """
    count = {"single": 1, "turns": rng.randint(2, 6), "document": rng.choice((1, 1, 2, 3))}[shape]
    system = ""
    if shape == "document":
        system = " ".join(["Notes:"] + [_note(rng) for _ in range(rng.randint(10, LONGEST_NOTES))])
    return Conversation(system, tuple(turn() for _ in range(count)), thinking)


def _note(rng: Random) -> str:
    text, classes = rng.choice(_NOTES)
    return text.format(*map(rng.choice, classes))
