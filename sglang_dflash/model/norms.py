"""Queries and keys of the drafter: RMS norm of each head, then RoPE, for a block and for the context alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sglang_dflash.ops import norm_rope


class QKNormRope(nn.Module):
    """The Q and K norms of all layers and the rotation that follows them.

    The layers' norm weights are rows of one tensor, of which each layer's parameters are views: one lookup then serves
    a whole forward, and an update of the weights misses no copy.

    Args:
        norms: (Q norm, K norm) of each layer; their weights may still be empty.
        num_heads, num_kv_heads: heads of this rank.
        eps: of every norm.
        rotary: SGLang's RoPE module, shared by all layers.
        positions: the rotation's table is grown to that many. It must not move later: CUDA graphs hold its address.
    """

    def __init__(
        self,
        norms: list[tuple[nn.Module, nn.Module]],
        num_heads: int,
        num_kv_heads: int,
        eps: float,
        rotary: Any,
        positions: int,
    ) -> None:
        super().__init__()
        rotary._ensure_cos_sin_cache_length(positions - 1)
        self._eps, self.rotary = eps, rotary
        params: list[Any] = [norm.weight for pair in norms for norm in pair]
        rows = torch.stack([param.data for param in params])
        for param, row in zip(params, rows, strict=True):
            param.data = row
        self._weights = rows.unflatten(0, (len(norms), 2))
        row_of_head = torch.tensor([0] * num_heads + [1] * num_kv_heads, device=rows.device)
        self.register_buffer("_row_of_head", row_of_head, persistent=False)

    def block(self, positions: Tensor) -> BlockNormRope:
        """What a forward over a block at ``positions`` int64 [T] needs in every layer."""
        self._assert_in_table(positions)
        return BlockNormRope(self, positions, self._weights.index_select(1, self._row_of_head))

    def context_keys(self, keys: Tensor, positions: Tensor) -> Tensor:
        """All layers' keys [L, T, num_kv_heads, head_dim], normalised and rotated."""
        self._assert_in_table(positions)
        return self.rotate(keys, self._weights[:, 1:].expand(-1, keys.shape[2], -1), positions)

    def rotate(self, heads: Tensor, weights: Tensor, positions: Tensor) -> Tensor:
        """:func:`~sglang_dflash.ops.reference.norm_rope` of [L, T, heads, head_dim]."""
        rotary = self.rotary
        return norm_rope(heads, weights, self._eps, positions, rotary.cos_sin_cache, neox=rotary.is_neox_style)

    def _assert_in_table(self, positions: Tensor) -> None:
        """On a GPU the kernel would read past the table, and to look at the positions would make the host wait."""
        if positions.is_cpu:
            rows = self.rotary.cos_sin_cache.shape[0]
            last = positions.numpy().max(initial=0)
            assert last < rows, f"position {last} in a RoPE table of {rows} rows"


@dataclass(frozen=True)
class BlockNormRope:
    """One forward's positions, int64 [T], and norm weight of every head, [L, num_heads + num_kv_heads, head_dim]."""

    layers: QKNormRope
    positions: Tensor
    weights: Tensor

    def __call__(self, layer_id: int, qkv: Tensor, query_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Q, K and V as attention takes them, each [T, heads * head_dim], from a layer's projection ``qkv``."""
        weights = self.weights[layer_id, None]
        heads, head_dim = weights.shape[1:]
        rotated = self.layers.rotate(qkv.unflatten(1, (-1, head_dim))[None, :, :heads], weights, self.positions)
        rotated = rotated.view(-1, heads * head_dim)
        return rotated[:, :query_size], rotated[:, query_size:], qkv[:, heads * head_dim :]
