"""Tasks whose answers repeat what the request has already: edits, the same question again, a quote from far back.

Made of the tiny pairs' corpus, whose forms are all that their targets can answer. Two sets share no question:
thresholds are chosen on :data:`TUNING`, tables are made with the other one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from random import Random
from zlib import crc32

from sglang_dflash_lab.bench.tasks.question import Message, Question
from sglang_dflash_lab.pairs.corpus import TASKS, Example, draw, words

SHORTEST_QUOTE, LONGEST_QUOTE = 5_000, 18_000
"""Characters between an answer and its quote; 2.8 are a token of the tiny pairs."""
TUNING = ":tuning"  # after a task's name: the set for choosing thresholds

# What an edit replaces in a question, and by what.
_EDITED: dict[str, tuple[str, tuple[str, ...]]] = {
    "json": (r"(?<!\d)\d+(?!\d)", tuple(map(str, range(11, 99)))),
    "code": (r"\d", tuple("23456789")),
    "chat": (rf"\b(?:{'|'.join((*words.NAMES, *words.DAYS))})\b", (*words.NAMES, *words.DAYS)),
}


def _edit(task: str, example: Callable[[str], Example], rng: Random) -> tuple[Message, ...]:
    """A question with its answer, then the same question with another number, name or day."""
    pattern, values = _EDITED[task]
    while True:
        first = example(task)
        if found := re.findall(pattern, first.question):
            break
    old = rng.choice(found)
    kind = next((names for names in (words.NAMES, words.DAYS) if old in names), values)
    new = rng.choice([value for value in kind if value not in first.question])
    return (*_turn(first), _user(re.sub(rf"(?<!\d){old}(?!\d)", new, first.question)))


def _repeat(example: Callable[[str], Example], rng: Random) -> tuple[Message, ...]:
    """A question with its answer, then the same question."""
    first = example(rng.choice(TASKS))
    return (*_turn(first), _user(first.question))


def _quote(example: Callable[[str], Example], rng: Random) -> tuple[Message, ...]:
    """A question with its answer, many others, then the first question again."""
    first = example("chat")
    messages, left = list(_turn(first)), rng.randint(SHORTEST_QUOTE, LONGEST_QUOTE)
    while left > 0:
        turn = _turn(example(rng.choice(("math", "json", "chat"))))  # code is slow to draw
        messages += turn
        left -= sum(len(message["content"]) for message in turn)
    return (*messages, _user(first.question))


_MAKERS: dict[str, Callable[[Callable[[str], Example], Random], tuple[Message, ...]]] = {
    "edit-json": lambda example, rng: _edit("json", example, rng),
    "edit-code": lambda example, rng: _edit("code", example, rng),
    "edit-chat": lambda example, rng: _edit("chat", example, rng),
    "repeat": _repeat,
    "quote": _quote,
}
TASK_NAMES = (*_MAKERS, *(name + TUNING for name in _MAKERS))


def load(name: str, count: int, seed: int) -> list[Question]:
    """``count`` questions of one of ``TASK_NAMES``; earlier turns carry the corpus's answers. Nobody grades them."""
    maker, tuning = _MAKERS[name.removesuffix(TUNING)], name.endswith(TUNING)
    rng = Random(f"{name}/{seed}")

    def example(task: str) -> Example:
        return next(drawn for drawn in _drawn(task, rng) if crc32(drawn.key.encode()) % 2 == tuning)

    return [Question(f"{name}/{seed}/{index}", maker(example, rng)) for index in range(count)]


def _drawn(task: str, rng: Random) -> Iterator[Example]:
    while True:
        yield draw(task, "heldout", rng)


def _turn(example: Example) -> tuple[Message, Message]:
    return _user(example.question), {"role": "assistant", "content": example.answer}


def _user(text: str) -> Message:
    return {"role": "user", "content": text}
