"""The tiny pairs' own tasks: held-out prompts made by code, so that benchmarks run on a machine without a network."""

from __future__ import annotations

from sglang_dflash.bench.grading import programs
from sglang_dflash.bench.tasks.question import Grader, Question
from sglang_dflash.pairs.corpus import TASKS, Prompt, prompts

__all__ = ["TASKS", "load"]


def load(name: str, count: int, seed: int) -> list[Question]:
    """`count` held-out questions; earlier turns carry the corpus's answers, so every prompt is the same in all arms."""
    return [
        Question(f"{seed}/{index}", prompt.messages, grader=_grader(prompt))
        for index, prompt in enumerate(prompts(name, "heldout", count, seed))
    ]


def _grader(prompt: Prompt) -> Grader:
    if prompt.task != "code":
        return prompt.check
    name, cases = prompt.expected["name"], prompt.expected["cases"]
    tests = "".join(f"assert {name}({numbers!r}) == {result!r}\n" for numbers, result in cases)
    return lambda answer: programs.passes(programs.code_block(answer), tests)
