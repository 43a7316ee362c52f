"""In bfloat16 a verify rounds where decoding does: its results are decoding's, but for sums in another order."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from measure.bfloat16_operations import Both, attention, convolution, gated_delta_rule

from sglang_dflash.pairs import target_path

CONFIG = json.loads((target_path("tiny-hybrid") / "config.json").read_text())
# Measured: 4 in 10,000 (docs/results/bfloat16.md). One more rounding on either side makes it one in ten or more.
SHARE = 0.002


def many_contexts(config: dict[str, Any]) -> Both:
    """Lengths that are attended to in one padded batch, and lengths for which each request has its own call."""
    results = [attention(config, lengths) for lengths in ([300] * 8, list(range(40, 1200, 150)))]
    return torch.cat([one for one, _ in results]), torch.cat([block for _, block in results])


@pytest.mark.parametrize("operation", [many_contexts, convolution, gated_delta_rule])
def test_a_verify_gives_decodings_bits(operation: Callable[[dict[str, Any]], Both]) -> None:
    torch.manual_seed(0)
    one, block = operation(CONFIG)
    assert one.dtype == block.dtype == torch.bfloat16 and one.shape == block.shape
    assert (one != block).float().mean() < SHARE
