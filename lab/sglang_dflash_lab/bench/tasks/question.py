"""A question of any task: a prompt, its further turns, and the grader of its answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sglang_dflash.diagnose.client import Message

Grader = Callable[[str], bool]


@dataclass(frozen=True)
class Question:
    """One prompt of a task.

    Attributes:
        id: unique within the task and the same in every session, so that arms and resumed runs can be matched.
        messages: OpenAI chat messages, the last one the user's.
        follow_ups: further user turns, each asked after the answer to the one before.
        grader: whether the text of the last answer is right; None if no machine can tell.
    """

    id: str
    messages: tuple[Message, ...]
    follow_ups: tuple[str, ...] = ()
    grader: Grader | None = None


def ask(identifier: str, prompt: str, grader: Grader | None = None) -> Question:
    """A question of a single user message."""
    return Question(identifier, ({"role": "user", "content": prompt},), grader=grader)
