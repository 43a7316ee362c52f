"""Tasks for a machine without a network: held-out prompts of the tiny pairs, made by code, and ``wild``.

``wild`` has prompts of all kinds, written by hand, far from what the tiny pairs were trained on: a drafter guesses
worst where its target was never taught. Nobody grades its answers; a tiny target writes nonsense there.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path

from sglang_dflash_lab.bench.tasks import answers
from sglang_dflash_lab.bench.tasks.question import Grader, Question, ask
from sglang_dflash_lab.pairs.corpus import TASKS, Prompt, prompts

__all__ = ["MIXED", "MIXTURES", "QUESTIONS", "TASKS", "WILD", "load", "wild_questions"]

MIXED = "mixed"  # all tasks in turn; half of the prompts are long, with earlier turns or a system message
QUESTIONS = "questions"  # all tasks in turn, one question each, as the public benchmarks ask
MIXTURES = (MIXED, QUESTIONS)


def load(name: str, count: int, seed: int) -> list[Question]:
    """``count`` held-out questions; earlier turns carry the corpus's answers, so every prompt is the same in all arms.

    A question's id begins with its task.
    """
    if name not in MIXTURES:
        return _questions(name, count, seed, shape=None)
    shape = "single" if name == QUESTIONS else None
    by_task = [_questions(task, -(-count // len(TASKS)), seed, shape) for task in TASKS]
    return list(chain.from_iterable(zip(*by_task, strict=True)))[:count]


def _questions(task: str, count: int, seed: int, shape: str | None) -> list[Question]:
    return [
        Question(f"{task}/{seed}/{index}", prompt.messages, grader=_grader(prompt))
        for index, prompt in enumerate(prompts(task, "heldout", count, seed, shape))
    ]


def _grader(prompt: Prompt) -> Grader:
    if prompt.task != "code":
        return prompt.check
    name, cases = prompt.expected["name"], prompt.expected["cases"]
    tests = "".join(f"assert {name}({numbers!r}) == {result!r}\n" for numbers, result in cases)
    return lambda answer: answers.passes(answers.code_block(answer), tests)


WILD = "wild"
_MARK = "%% "  # begins the line before a prompt, which gives its kind and name
_FILE = Path(__file__).with_name("wild.txt")


def wild_questions() -> list[Question]:
    """All of them, in the order of ``wild.txt``; a question's id begins with its kind."""
    blocks = f"\n{_FILE.read_text(encoding='utf-8')}".split(f"\n{_MARK}")[1:]
    return [ask(name, prompt.strip("\n")) for name, _, prompt in (block.partition("\n") for block in blocks)]
