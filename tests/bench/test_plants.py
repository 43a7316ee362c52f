"""The plugins beside the package are found by their folder alone, and the planted faults do what they say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

MEASURE = Path(__file__).parents[2] / "measure"
LIST = "from importlib.metadata import entry_points; print([e.value for e in entry_points(group='sglang.srt.plugins')])"


@pytest.mark.parametrize(
    ("folder", "entry"),
    [("peers", "builtin_on_cpu:register"), ("plants", "planted_faults:register")],
)
def test_a_folder_on_the_path_is_a_plugin(folder: str, entry: str):
    listed = [
        subprocess.run([sys.executable, "-c", LIST], env=env, capture_output=True, text=True, check=True).stdout
        for env in ({**os.environ, "PYTHONPATH": str(MEASURE / folder)}, {**os.environ, "PYTHONPATH": ""})
    ]
    assert entry in listed[0]
    assert entry not in listed[1]


def test_every_nth_decode_step_reports_one_wrong_token(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(MEASURE / "plants")
    import planted_faults

    right = torch.arange(8)
    step = planted_faults.wrong_tokens(2)

    def run(decode: bool) -> list[int]:
        batch = SimpleNamespace(forward_mode=SimpleNamespace(is_decode=lambda: decode))
        result = SimpleNamespace(next_token_ids=right)
        return step(lambda worker, batch: result, None, batch).next_token_ids.tolist()

    assert run(decode=True) == right.tolist()
    assert run(decode=False) == right.tolist()
    assert run(decode=True) == [1, *range(1, 8)]
    assert right.tolist() == list(range(8))  # the worker's own tensor is left alone


def test_only_decode_steps_are_slowed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(MEASURE / "plants")
    import planted_faults

    slept: list[float] = []
    monkeypatch.setattr(planted_faults.time, "sleep", slept.append)
    step = planted_faults.slow_steps(0.05)
    for decode in (True, False):
        batch = SimpleNamespace(forward_mode=SimpleNamespace(is_decode=lambda decode=decode: decode))
        assert step(lambda worker, batch: "result", None, batch) == "result"
    assert slept == [0.05]
