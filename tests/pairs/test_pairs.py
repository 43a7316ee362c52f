"""The tiny pairs: corpus, shipped weights and the noisy drafter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from safetensors import safe_open

from sglang_dflash_lab.pairs import NAMES, drafter_kinds, drafter_path, target_path
from sglang_dflash_lab.pairs.corpus import SHAPES, TASKS, code_task, draw, prompts
from sglang_dflash_lab.train.loop import read_provenance


@pytest.mark.parametrize("task", TASKS)
def test_train_and_heldout_never_share_a_question_or_its_parameters(task: str) -> None:
    train, heldout = (
        [draw(task, split, rng) for _ in range(number)]
        for split, number, rng in (("train", 1000, Random(1)), ("heldout", 500, Random(2)))
    )
    for part in ("question", "key"):
        assert not {getattr(each, part) for each in train} & {getattr(each, part) for each in heldout}


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


DRAFTERS = [drafter_path(name, kind) for name in NAMES for kind in drafter_kinds(name)]
FOLDERS = [*map(target_path, NAMES), *DRAFTERS]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: f"{folder.parent.name}-{folder.name}")
def test_every_model_is_bf16_safetensors_with_its_provenance(folder: Path) -> None:
    with safe_open(folder / "model.safetensors", "pt") as weights:
        names = weights.keys()
        assert {weights.get_slice(name).get_dtype() for name in names} == {"BF16"}
    assert "auto_map" not in json.loads((folder / "config.json").read_text())
    assert (folder / "loss.png").stat().st_size > 1000
    provenance = read_provenance(folder)
    for key in ("command", "commit", "machine", "versions", "seed", "recipe", "minutes", "log"):
        assert provenance[key] not in (None, "", [], {}), key
    assert provenance["minutes"] <= 90  # of one core, shared with other work: 45 minutes of two


def test_two_processes_may_make_it_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    program = "from sglang_dflash_lab.pairs import drafter_path; print(drafter_path('tiny-dense', 'noisy'))"
    both = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert {process.communicate()[0].strip() for process in both} == {str(drafter_path("tiny-dense", "noisy"))}
    assert [process.returncode for process in both] == [0, 0]
