"""One question with its checkable answer, and the rule that says which split it belongs to."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

HELDOUT_EVERY = 8


@dataclass(frozen=True)
class Example:
    """A question of one task.

    Attributes:
        task: ``math``, ``code``, ``json`` or ``chat``.
        key: the parameters of the question in canonical form, without its wording.
        question: the user's message.
        thought: what a model in thinking mode writes before its answer.
        answer: one right answer.
        expected: what ``check`` compares with; JSON-able.
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
    """``heldout`` for one key in ``HELDOUT_EVERY``, else ``train``.

    The split is a function of the key and of nothing else: however often, in whatever wording and from
    whatever seed a question is drawn, it is on the same side. ``blake2b`` because Python's ``hash`` differs per
    process.
    """
    digest = hashlib.blake2b(key.encode(), digest_size=4).digest()
    return "heldout" if int.from_bytes(digest, "big") % HELDOUT_EVERY == 0 else "train"
