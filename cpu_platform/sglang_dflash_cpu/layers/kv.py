"""KV slots and the K/V pool in plain torch, where SGLang launches Triton kernels or needs a ``nonzero``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_dflash.upstream import MHATokenToKVPool


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


PADDING_SLOT = 0


class CpuKVPool(MHATokenToKVPool):
    """``k_buffer`` and ``v_buffer``: per layer ``[slots, kv_heads, head_dim]``."""

    def _init_kv_copy_and_warmup(self) -> None:
        self._kv_copy_config = None
        self.use_native_move_kv_cache = True

    def _store_kv_layer(self, layer_idx: int, loc: Tensor, cache_k: Tensor, cache_v: Tensor) -> None:
        """Write rows ``cache_k``/``cache_v [N, kv_heads, head_dim]`` into slots ``loc [N]`` of one layer."""
        self.k_buffer[layer_idx].index_copy_(0, loc, cache_k)
        self.v_buffer[layer_idx].index_copy_(0, loc, cache_v)

    def set_kv_buffer_prefix_valid(
        self,
        layer: Any,
        loc_2d: Tensor,
        commit_lens: Tensor,
        cache_k: Tensor,
        cache_v: Tensor,
        k_scale: float | None = None,
        v_scale: float | None = None,
        layer_id_override: int | None = None,
    ) -> None:
        """Write the accepted prefix of every block; the other rows go to the padding slot.

        Writing all rows costs less than selecting some, and needs no count on the host.

        Args:
            loc_2d: slots of the blocks ``[B, T]`` int64.
            commit_lens: accepted tokens of each block ``[B]``.
            cache_k, cache_v: ``[B*T, kv_heads, head_dim]``.
        """
        accepted = torch.arange(loc_2d.shape[1]) < commit_lens.unsqueeze(1)
        loc = torch.where(accepted, loc_2d, PADDING_SLOT).view(-1)
        self.set_kv_buffer(layer, loc, cache_k, cache_v, k_scale, v_scale, layer_id_override)
