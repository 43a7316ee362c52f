"""A block's M-RoPE positions are those that SGLang's own workers use."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang_dflash.upstream import ForwardBatch
from sglang_dflash.worker.step import rope_positions

pytestmark = pytest.mark.sglang

BLOCKS = torch.tensor([40, 41, 42, 7, 8, 9, 100, 101, 102])
SMALL, LARGE = (SimpleNamespace(mrope_position_delta=torch.tensor([[delta]])) for delta in (-8, -95))


@pytest.mark.parametrize("inputs", [[None] * 3, [SMALL, None, LARGE], [None, None, SMALL]])
def test_equal_to_sglangs(inputs: list[Any]) -> None:
    forward: Any = SimpleNamespace(seq_lens=torch.zeros(3), mrope_positions=None)
    batch: Any = SimpleNamespace(multimodal_inputs=inputs)
    ForwardBatch.compute_spec_mrope_positions(forward, SimpleNamespace(device="cpu"), batch, seq_positions=BLOCKS)
    found = rope_positions(BLOCKS, inputs)
    assert found.dtype == torch.int64
    assert torch.equal(found, forward.mrope_positions)
