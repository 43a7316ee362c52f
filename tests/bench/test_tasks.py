"""Prompts are asked as the cards' authors ask them; a dataset that cannot be reached is one clear error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_dflash.errors import DFlashError
from sglang_dflash_lab.bench import tasks
from sglang_dflash_lab.bench.tasks import offline
from sglang_dflash_lab.pairs.corpus import prompts

STEP_BY_STEP = "\nPlease reason step by step, and put your final answer within \\boxed{}."
ROWS = {
    "gsm8k": {"question": "2+2?", "answer": "It is 4.\n#### 4"},
    "math500": {"problem": "2+2?", "answer": "4", "unique_id": "a/1"},
    "humaneval": {
        "task_id": "HumanEval/0",
        "prompt": 'import math\n\n\ndef area(r):\n    """Area of a circle."""\n',
        "entry_point": "area",
        "test": "def check(candidate):\n    assert candidate(1) == math.pi\n",
    },
    "mbpp": {
        "task_id": 2,
        "prompt": "Write a function to double a number.",
        "test_imports": ["import math"],
        "test_list": ["assert double(2) == math.trunc(4.0)"],
    },
    "mt-bench": {"prompt_id": 81, "prompt": ["First.", "Second."]},
    "alpaca": {"instruction": "Sum up.", "input": "A text."},
    "livecodebench": {
        "question_id": "q1",
        "question_content": "Add two numbers.",
        "starter_code": "",
        "public_test_cases": json.dumps([{"input": "1 2", "output": "3", "testtype": "stdin"}]),
        "metadata": "{}",
    },
}


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    for name, row in ROWS.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    return tmp_path


def question(name: str, data_dir: Path):
    (found,) = tasks.load(name, 1, data_dir=data_dir)
    return found


@pytest.mark.parametrize(
    ("name", "prompt"),
    [
        ("gsm8k", "2+2?" + STEP_BY_STEP),
        ("math500", "2+2?" + STEP_BY_STEP),
        (
            "humaneval",
            "Write a solution to the following problem and make sure that it passes the tests:\n"
            f"```python\n{ROWS['humaneval']['prompt']}\n```",
        ),
        ("mbpp", "Write a function to double a number."),
        ("mt-bench", "First."),
        ("alpaca", "Sum up.\n\nInput:\nA text."),
    ],
)
def test_prompt_as_published(name: str, prompt: str, data_dir: Path):
    asked = question(name, data_dir)
    assert asked.messages == ({"role": "user", "content": prompt},)
    assert asked.follow_ups == (("Second.",) if name == "mt-bench" else ())


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("gsm8k", r"\boxed{4}", r"\boxed{5}"),
        ("math500", r"\boxed{4}", "5"),
        (
            "humaneval",
            "```python\ndef area(r):\n    return math.pi * r * r\n```",
            "```python\ndef area(r): return 3\n```",
        ),
        ("mbpp", "```python\ndef double(n): return 2 * n\n```", "I cannot."),
        ("livecodebench", "```python\nprint(sum(map(int, input().split())))\n```", "```python\nprint(4)\n```"),
    ],
)
def test_grader(name: str, right: str, wrong: str, data_dir: Path):
    grader = question(name, data_dir).grader
    assert grader is not None
    assert grader(right)
    assert not grader(wrong)


@pytest.mark.parametrize("name", offline.TASKS)
def test_the_tiny_pairs_own_answers_are_right(name: str):
    asked = tasks.load(name, 4, seed=3)
    for item, prompt in zip(asked, prompts(name, "heldout", 4, 3), strict=True):
        assert item.messages == prompt.messages
        assert item.grader is not None
        assert item.grader(prompt.answer)
        assert not item.grader("I do not know")


def test_questions_are_drawn_by_seed_and_never_twice(tmp_path: Path):
    rows = [{"question": f"{i}?", "answer": f"#### {i}"} for i in range(20)]
    (tmp_path / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, again, other = ([q.id for q in tasks.load("gsm8k", 8, seed=s, data_dir=tmp_path)] for s in (1, 1, 2))
    assert first == again != other
    assert len(set(first)) == 8
    assert len(tasks.load("gsm8k", 100, data_dir=tmp_path)) == 20


def test_data_out_of_reach_names_the_way_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    with pytest.raises(DFlashError, match="math500"):
        tasks.load("gsm9k", 1)
    with pytest.raises(DFlashError, match=r"gsm8k.jsonl does not exist.*openai/gsm8k"):
        tasks.load("gsm8k", 1, data_dir=tmp_path)
    pytest.importorskip("datasets")
    import datasets.config
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    with pytest.raises(DFlashError, match=r"openai/gsm8k.*--data-dir"):
        tasks.load("gsm8k", 1)
