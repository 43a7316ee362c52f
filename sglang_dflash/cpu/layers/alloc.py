"""Reads and writes of the KV slot table ``req_to_token [requests, positions]`` that SGLang does in Triton."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def block_slots(
    *,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    batch_size: int,
    draft_token_num: int,
    device: Any,
) -> Tensor:
    """KV slots of the block of ``draft_token_num`` positions that starts at ``start_offset [B]``.

    Returns ``[B*T]`` int64. All blocks have the same length, so ``end_offset`` is not needed.
    """
    rows = req_pool_indices[:batch_size].unsqueeze(1)
    columns = start_offset[:batch_size].unsqueeze(1) + torch.arange(draft_token_num)
    return req_to_token[rows, columns].view(-1).long()


def assign_slots(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    batch_size: int,
) -> None:
    """Write KV slots ``out_cache_loc [N]`` to positions ``start_offset .. end_offset - 1`` of each request.

    The slots of one request follow those of the one before it; ``N`` is the sum of the lengths.
    """
    lens = end_offset - start_offset
    total = out_cache_loc.shape[0]
    rows = req_pool_indices.repeat_interleave(lens, output_size=total)
    # Position of slot n: its index among its own request's slots, from that request's start on.
    offset = (start_offset - (lens.cumsum(0) - lens)).repeat_interleave(lens, output_size=total)
    req_to_token[rows, torch.arange(total) + offset] = out_cache_loc.to(req_to_token.dtype)


def last_slots(req_to_token: Tensor, req_pool_indices_tensor: Tensor, prefix_lens_tensor: Tensor) -> Tensor:
    """KV slot of the last token of each request's prefix ``[B]``, -1 without a prefix."""
    slots = req_to_token[req_pool_indices_tensor, (prefix_lens_tensor - 1).clamp_(min=0)]
    return torch.where(prefix_lens_tensor > 0, slots.to(prefix_lens_tensor.dtype), -1)
