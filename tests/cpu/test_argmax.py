"""The token of the largest logit is torch's, whichever library looks for it."""

from __future__ import annotations

import pytest
import torch

from sglang_dflash_cpu.layers.step_ops import argmax


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (3, 1000), (128, 1024)])
def test_it_is_torchs(shape: tuple[int, int], dtype: torch.dtype) -> None:
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    tokens = argmax(logits)
    assert tokens.dtype == torch.int64
    assert torch.equal(tokens, logits.argmax(-1))


def test_rows_may_be_slices_and_tensors_of_inference_mode() -> None:
    with torch.inference_mode():
        wide = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
        assert torch.equal(argmax(wide[1:, :40]), wide[1:, :40].argmax(-1))
