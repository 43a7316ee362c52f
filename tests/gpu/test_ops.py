"""The Triton kernels on a CUDA device: equal to their definitions there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sglang_dflash.ops import filter_probs, reference

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


def test_the_filters_of_seeded_draws_equal_their_definition_on_the_device() -> None:
    """SGLang's kernels sum in another order, so an entry at a top-p limit may fall on either side."""
    torch.manual_seed(0)
    rows, vocab = 64, 151_936
    probs = torch.softmax(torch.randn(rows, vocab, device="cuda") * 3, dim=-1)
    top_ks = torch.tensor([1, 20, 1000, 1 << 30], dtype=torch.int32, device="cuda").repeat(rows // 4)
    top_ps = torch.tensor([0.5, 0.95], device="cuda").repeat_interleave(rows // 2)
    top_ps[::7] = 1.0
    min_ps = torch.tensor([0.0, 0.1], device="cuda").repeat(rows // 2)
    found, expected = filter_probs(probs, top_ks, top_ps, min_ps), reference.filter_probs(probs, top_ks, top_ps, min_ps)
    differ = found != expected
    assert differ.sum(dim=1).max() <= 1
    assert torch.where(differ, probs, 0.0).max() < 1e-4
    assert not differ[top_ps >= 1].any()
