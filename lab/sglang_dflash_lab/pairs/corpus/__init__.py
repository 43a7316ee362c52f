"""Synthetic, deterministic, licence-free prompts: four tasks, disjoint train and held-out splits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from types import ModuleType
from typing import Any

from sglang_dflash_lab.pairs import check_known
from sglang_dflash_lab.pairs.corpus import chat_task, code_task, json_task, math_task
from sglang_dflash_lab.pairs.corpus.conversation import SHAPES, Conversation, Example, draw_conversation, split_of

__all__ = ["SHAPES", "TASKS", "Conversation", "Example", "check", "draw", "draw_conversation", "prompts", "split_of"]

_TASK_MODULES: dict[str, ModuleType] = {"math": math_task, "code": code_task, "json": json_task, "chat": chat_task}
TASKS = tuple(_TASK_MODULES)
SPLITS = ("train", "heldout")


@dataclass(frozen=True)
class Prompt:
    """A conversation without its last answer.

    Attributes:
        task: of the last question.
        messages: OpenAI chat messages, the last one the user's.
        expected: JSON value that ``check`` compares with.
    """

    task: str
    shape: str
    messages: tuple[dict[str, str], ...]
    answer: str
    expected: Any

    def check(self, answer_text: str) -> bool:
        return check(self.task, self.expected, answer_text)


def draw(task: str, split: str, rng: Random) -> Example:
    while True:
        example: Example = _TASK_MODULES[task].draw(rng)
        if example.split == split:
            return example


def check(task: str, expected: Any, answer_text: str) -> bool:
    """Return whether ``answer_text``, without its thinking, answers a question of ``task``."""
    return bool(_TASK_MODULES[task].check(expected, answer_text.rpartition("</think>")[2].strip()))


def prompts(task: str, split: str = "heldout", n: int = 8, seed: int = 0, shape: str | None = None) -> list[Prompt]:
    """Return ``n`` prompts, the same for the same arguments; a longer list starts with the shorter one.

    Args:
        task: of the last question.
        split: of every turn.
        shape: one of ``SHAPES``; None: half single, a quarter each of the others.

    Raises:
        DFlashError: an unknown task, split or shape.
    """
    check_known("task", task, TASKS)
    check_known("split", split, SPLITS)
    check_known("shape", shape or SHAPES[0], SHAPES)
    rng = Random(f"prompts/{task}/{split}/{seed}/{shape}")
    return [_prompt(task, split, shape or rng.choice(("single", *SHAPES)), rng) for _ in range(n)]


def _prompt(task: str, split: str, shape: str, rng: Random) -> Prompt:
    drawn = draw_conversation(rng, shape, lambda: draw(rng.choice(TASKS), split, rng))
    last = draw(task, split, rng)
    conversation = replace(drawn, turns=(*drawn.turns[:-1], last))
    return Prompt(task, shape, tuple(conversation.messages()), last.answer, last.expected)
