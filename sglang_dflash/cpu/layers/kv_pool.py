"""The K/V pool of a multi-head attention model on a CPU.

Layout, addressing and sizing are SGLang's; three methods that launch Triton kernels, or need a
``nonzero``, are plain torch here. Slot 0 belongs to no request: SGLang keeps it, and the page around it,
for padding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_dflash.upstream import MHATokenToKVPool

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
