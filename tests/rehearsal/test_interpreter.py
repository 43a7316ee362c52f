"""Triton's interpreter in a rehearsal: launches are counted, and kept within their tensors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import torch, triton, triton.language as tl
from tests.rehearsal import interpreter
interpreter.install()

alias = tl.exp

@triton.jit
def copy(source, target, n, ROWS: tl.constexpr):
    lane = tl.arange(0, ROWS)
    tl.store(target + lane, alias(tl.load(source + lane, mask=lane < n)), mask=lane < n)

whole = torch.zeros(16)
copy[(1,)](whole[:8], target := torch.zeros(8), {n}, ROWS=16)
assert target.tolist() == [1.0] * 8
assert interpreter.LAUNCHES == {{"__main__.copy": 1}}, interpreter.LAUNCHES
"""


@pytest.mark.parametrize("n, error", [(8, ""), (9, "OutOfBounds")])
def test_a_launch_stays_within_its_tensors(n: int, error: str, tmp_path: Path) -> None:
    """Nine values are still in the storage of the source, but not in the tensor that was passed."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM.format(n=n))
    ended = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert bool(ended.returncode) == bool(error), ended.stderr
    assert error in ended.stderr
