"""Where the target's rotation counts a block's tokens if images came before them (M-RoPE)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sglang_dflash.upstream import async_h2d_stack


def rope_positions(positions: Tensor, inputs: Sequence[Any]) -> Tensor:
    """Positions in time, row and column, int64 [3, bs * w]; for text all three are the same.

    An image takes up as many positions as its longer side has tokens, not as many as it has tokens, so text after it
    counts from further back (Wang et al., 2024, Qwen2-VL, section 2.1); SGLang found out by how much with the prompt.

    SGLang's own function for this copies those distances from pageable memory: in each step the host would wait for the
    drafter.

    Args:
        positions: int64 [bs * w], places in the sequence.
        inputs: SGLang's ``MultimodalInputs`` of each request, None for text alone.
    """
    if any(each is not None for each in inputs):
        none = torch.zeros(1, dtype=torch.int64)
        distances = [none if each is None else each.mrope_position_delta.view(1) for each in inputs]
        block = positions.view(len(inputs), -1) + async_h2d_stack(distances, device=positions.device)
        positions = block.flatten()
    return positions.repeat(3, 1)
