"""The corpus: held-out prompts are new by construction, answers are checkable, everything repeats by seed."""

from __future__ import annotations

import json
from random import Random

import pytest

from sglang_dflash_lab.pairs.corpus import SHAPES, TASKS, code_task, draw, prompts, split_of


def questions(task: str, split: str, n: int, seed: int) -> dict[str, str]:
    """Question text -> key."""
    rng = Random(seed)
    drawn = [draw(task, split, rng) for _ in range(n)]
    return {example.question: example.key for example in drawn}


@pytest.mark.parametrize("task", TASKS)
def test_train_and_heldout_never_share_a_question_or_its_parameters(task: str) -> None:
    train, heldout = questions(task, "train", 1000, 1), questions(task, "heldout", 500, 2)
    assert not train.keys() & heldout.keys()
    assert not set(train.values()) & set(heldout.values())
    assert all(split_of(f"{task}/{key}") == "train" for key in train.values())
    assert all(split_of(f"{task}/{key}") == "heldout" for key in heldout.values())


def test_every_turn_of_a_heldout_prompt_is_held_out() -> None:
    train = {q for task in TASKS for q in questions(task, "train", 600, 3)}
    for task in TASKS:
        asked = [m["content"] for p in prompts(task, n=150) for m in p.messages if m["role"] == "user"]
        assert len(asked) > 250 and not train & set(asked)


@pytest.mark.parametrize("task", TASKS)
def test_prompts_repeat_by_seed_and_a_longer_list_starts_with_the_shorter(task: str) -> None:
    assert prompts(task, n=20, seed=5) == prompts(task, n=30, seed=5)[:20]
    assert prompts(task, n=20, seed=5) != prompts(task, n=20, seed=6)
    assert prompts(task, "train", n=20, seed=5) != prompts(task, "heldout", n=20, seed=5)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_given_answer_is_right_and_another_prompts_answer_is_wrong(task: str, shape: str) -> None:
    asked = prompts(task, n=40, shape=shape)
    assert all(p.check(p.answer) for p in asked)
    assert all(json.loads(json.dumps(p.expected)) == p.expected for p in asked)  # the command line prints it
    assert all(p.check(f"I think first.\n</think>\n\n{p.answer}") for p in asked)
    others = [(p, q) for p, q in zip(asked, asked[1:], strict=False) if p.expected != q.expected]
    assert not any(p.check(q.answer) for p, q in others)
    assert not any(p.check("") for p in asked)


@pytest.mark.parametrize(
    "body",
    ["import os", "while True: pass", "return nums.__class__", "return 9 ** 9", "return open('x')"]
    + ["return [nums.append(n) for n in nums]", "return 1 / 0", "return undefined"],
)
def test_code_that_fails_or_could_harm_does_not_run(body: str) -> None:
    expected = {"name": "f", "cases": [[[], 0], [[1, 2], 3]]}
    assert not code_task.check(expected, f"```python\ndef f(nums):\n    {body}\n```")
