"""Prompts of a benchmark: held-out questions of the tiny pairs, other prompts, or a file.

Prompts that repeat earlier text come in two disjoint sets; tasks that end with :data:`TUNING` chose the thresholds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from random import Random
from zlib import crc32

from sglang_dflash.check.diagnose.client import Message
from sglang_dflash.errors import DFlashError
from sglang_dflash_lab.pairs.corpus import TASKS, Example, draw, prompts, words

Messages = tuple[Message, ...]
MIXED, QUESTIONS, WILD = "mixed", "questions", "wild"
TUNING = ":tuning"
# Characters between an answer and its quote; a tiny pair's token has 2.8.
SHORTEST_QUOTE, LONGEST_QUOTE = 5_000, 18_000


def load(name: str, count: int, seed: int = 0) -> list[Messages]:
    """Return up to ``count`` different prompts of a task, the same for the same arguments.

    Args:
        name: one of :data:`NAMES`, or a JSON-lines file with ``messages`` in each row.

    Raises:
        DFlashError: an unknown task, or an invalid file.
    """
    if name in TASKS:
        return _held_out(name, count, seed, None)
    if name in (MIXED, QUESTIONS):
        shape = "single" if name == QUESTIONS else None
        by_task = [_held_out(task, -(-count // len(TASKS)), seed, shape) for task in TASKS]
        return list(chain.from_iterable(zip(*by_task, strict=True)))[:count]
    if name in NAMES and name != WILD:
        return _repeating(name, count, seed)
    wild = Path(__file__).with_name("wild.txt")
    found = [messages for _, messages in read_marked(wild)] if name == WILD else _read(Path(name))
    return found if count >= len(found) else Random(seed).sample(found, count)


def _held_out(task: str, count: int, seed: int, shape: str | None) -> list[Messages]:
    return [prompt.messages for prompt in prompts(task, "heldout", count, seed, shape)]


def read_marked(path: Path) -> list[tuple[str, Messages]]:
    """Return kind and messages of a file's prompts, each after a line ``%% KIND``."""
    blocks = f"\n{path.read_text(encoding='utf-8')}".split("\n%% ")[1:]
    return [(kind, (_user(text.strip("\n")),)) for kind, _, text in (block.partition("\n") for block in blocks)]


def _read(path: Path) -> list[Messages]:
    try:
        lines = path.read_text().splitlines()
        return [tuple(json.loads(line)["messages"]) for line in lines if line.strip()]
    except (OSError, ValueError, KeyError) as error:
        raise DFlashError(
            f"task {str(path)!r} cannot be read ({type(error).__name__}: {error})",
            remedy=f"choose one of {', '.join(NAMES)}, or give a JSON-lines file with `messages` in each row",
        ) from error


# Pattern and replacements of an edit.
_EDITED: dict[str, tuple[str, tuple[str, ...]]] = {
    "json": (r"(?<!\d)\d+(?!\d)", tuple(map(str, range(11, 99)))),
    "code": (r"\d", tuple("23456789")),
    "chat": (rf"\b(?:{'|'.join((*words.NAMES, *words.DAYS))})\b", (*words.NAMES, *words.DAYS)),
}
Draw = Callable[[str], Example]  # task -> question


def _edit(task: str, example: Draw, rng: Random) -> Messages:
    # A question with its answer, then the question with another number, name or day.
    pattern, values = _EDITED[task]
    while True:
        first = example(task)
        if found := re.findall(pattern, first.question):
            break
    old = rng.choice(found)
    kind = next((names for names in (words.NAMES, words.DAYS) if old in names), values)
    new = rng.choice([value for value in kind if value not in first.question])
    return (*_turn(first), _user(re.sub(rf"(?<!\d){old}(?!\d)", new, first.question)))


def _repeat(example: Draw, rng: Random) -> Messages:
    first = example(rng.choice(TASKS))
    return (*_turn(first), _user(first.question))


def _quote(example: Draw, rng: Random) -> Messages:
    # The first question again after many others.
    first = example("chat")
    messages, left = list(_turn(first)), rng.randint(SHORTEST_QUOTE, LONGEST_QUOTE)
    while left > 0:
        turn = _turn(example(rng.choice(("math", "json", "chat"))))  # code is slow to draw
        messages += turn
        left -= sum(len(message["content"]) for message in turn)
    return (*messages, _user(first.question))


_MAKERS: dict[str, Callable[[Draw, Random], Messages]] = {
    **{f"edit-{task}": partial(_edit, task) for task in _EDITED},
    "repeat": _repeat,
    "quote": _quote,
}
NAMES = (*TASKS, MIXED, QUESTIONS, WILD, *_MAKERS, *(name + TUNING for name in _MAKERS))


def _repeating(name: str, count: int, seed: int) -> list[Messages]:
    maker, tuning, rng = _MAKERS[name.removesuffix(TUNING)], name.endswith(TUNING), Random(f"{name}/{seed}")

    def example(task: str) -> Example:
        while crc32((drawn := draw(task, "heldout", rng)).key.encode()) % 2 != tuning:
            continue
        return drawn

    return [maker(example, rng) for _ in range(count)]


def _turn(example: Example) -> tuple[Message, Message]:
    return _user(example.question), {"role": "assistant", "content": example.answer}


def _user(text: str) -> Message:
    return {"role": "user", "content": text}
