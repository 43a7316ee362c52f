"""The Triton kernels on a CUDA device: equal to their definitions there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device that this torch can use"),
]


@pytest.mark.parametrize("cases", ["ops/cases.py", "states/cases.py"])
def test_kernels_equal_their_definitions_on_the_device(cases: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", str(Path(__file__).parents[1] / cases)],
        env={**os.environ, "OPS_DEVICE": "cuda", "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
