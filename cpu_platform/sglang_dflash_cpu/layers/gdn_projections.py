"""Splits of the fused input projections of a GDN layer, as Qwen3-Next and Qwen3.5 lay them out."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache
def _ungrouped_columns(heads_qk: int, heads_v: int, head_qk: int, head_v: int) -> tuple[Tensor, Tensor]:
    """Orders of columns that bring projections grouped by key head to ``q|k|v|z`` and ``b|a``."""
    ratio = heads_v // heads_qk

    def ungroup(*widths: int) -> Tensor:
        columns = torch.arange(heads_qk * sum(widths)).view(heads_qk, -1)
        return torch.cat([part.flatten() for part in columns.split(widths, dim=1)])

    return ungroup(head_qk, head_qk, ratio * head_v, ratio * head_v), ungroup(ratio, ratio)


def split_grouped(
    mixed_qkvz: Tensor, mixed_ba: Tensor, num_heads_qk: int, num_heads_v: int, head_qk: int, head_v: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split Qwen3-Next's projections, whose columns are grouped by key head.

    Args:
        mixed_qkvz: ``[tokens, H * (K + K + r * V + r * V)]`` with ``r = HV / H``; a group is ``q|k|v|z``.
        mixed_ba: ``[tokens, H * 2 * r]``; a group is ``b|a``.

    Returns:
        ``mixed_qkv [tokens, q|k|v]``, ``z [tokens, HV, V]``, ``b [tokens, HV]``, ``a [tokens, HV]``.
    """
    heads = (num_heads_qk, num_heads_v, head_qk, head_v)
    qkvz_order, ba_order = _ungrouped_columns(*heads)
    return split(mixed_qkvz.index_select(1, qkvz_order), mixed_ba.index_select(1, ba_order), *heads)


def split(
    mixed_qkvz: Tensor, mixed_ba: Tensor, num_heads_qk: int, num_heads_v: int, head_qk: int, head_v: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split Qwen3.5's projections, whose columns are ``q|k|v|z`` and ``b|a`` already, into views.

    Args and returns are those of :func:`split_grouped`, up to the order of columns.
    """
    qkv_width = 2 * num_heads_qk * head_qk + num_heads_v * head_v
    z = mixed_qkvz[:, qkv_width:].view(-1, num_heads_v, head_v)
    return mixed_qkvz[:, :qkv_width], z, mixed_ba[:, :num_heads_v], mixed_ba[:, num_heads_v:]
