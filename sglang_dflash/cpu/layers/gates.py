"""Splits of the fused input projections, and sigmoid gates, of the Qwen3-Next and Qwen3.5 layers."""

from __future__ import annotations

from functools import lru_cache

import torch


@lru_cache
def _ungrouped_columns(heads_qk: int, heads_v: int, head_qk: int, head_v: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Orders of columns that bring projections grouped by key head to ``q|k|v|z`` and ``b|a``."""
    ratio = heads_v // heads_qk

    def ungroup(*widths: int) -> torch.Tensor:
        columns = torch.arange(heads_qk * sum(widths)).view(heads_qk, -1)
        return torch.cat([part.flatten() for part in columns.split(widths, dim=1)])

    return ungroup(head_qk, head_qk, ratio * head_v, ratio * head_v), ungroup(ratio, ratio)


def split_grouped_projections(
    mixed_qkvz: torch.Tensor,
    mixed_ba: torch.Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split Qwen3-Next's projections, whose columns are grouped by key head.

    Args:
        mixed_qkvz: ``[tokens, H * (K + K + r * V + r * V)]`` with ``r = HV / H``; a group is ``q|k|v|z``.
        mixed_ba: ``[tokens, H * 2 * r]``; a group is ``b|a``.

    Returns:
        ``mixed_qkv [tokens, q|k|v]``, ``z [tokens, HV, V]``, ``b [tokens, HV]``, ``a [tokens, HV]``.
    """
    qkvz_order, ba_order = _ungrouped_columns(num_heads_qk, num_heads_v, head_qk, head_v)
    return split_projections(
        mixed_qkvz.index_select(1, qkvz_order),
        mixed_ba.index_select(1, ba_order),
        num_heads_qk,
        num_heads_v,
        head_qk,
        head_v,
    )


def split_projections(
    mixed_qkvz: torch.Tensor,
    mixed_ba: torch.Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split Qwen3.5's projections, whose columns are ``q|k|v|z`` and ``b|a`` already, into views.

    Args and returns are those of :func:`split_grouped_projections`, up to the order of columns.
    """
    qkv_width = 2 * num_heads_qk * head_qk + num_heads_v * head_v
    z = mixed_qkvz[:, qkv_width:].view(-1, num_heads_v, head_v)
    return mixed_qkvz[:, :qkv_width], z, mixed_ba[:, :num_heads_v], mixed_ba[:, num_heads_v:]


def sigmoid_mul(
    attn_output: torch.Tensor, gate: torch.Tensor, inplace: bool = False, quant: bool = False
) -> torch.Tensor:
    """``attn_output * sigmoid(gate)`` in fp32, rounded once.

    Args:
        attn_output: ``[tokens, heads * D]``; overwritten if ``inplace``.
        gate: the same elements, ``[tokens, heads * D]`` or a strided ``[tokens, heads, D]``.
        quant: asks for an FP8 result, which this platform does not have.
    """
    if quant:
        raise NotImplementedError("on a CPU, fused_sigmoid_mul has no FP8 output")
    out = attn_output if inplace else torch.empty_like(attn_output)
    return torch.mul(attn_output, gate.reshape(attn_output.shape).float().sigmoid(), out=out)


def add_gated(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    shared_output: torch.Tensor,
    final_hidden_states: torch.Tensor,
) -> None:
    """Add the shared expert, gated per token, in place: ``final += sigmoid(hidden @ gate_weight) * shared``.

    Args:
        hidden_states: input of the MoE block, ``[tokens, dim]``.
        gate_weight: ``[dim]``.
        shared_output: ``[tokens, dim]``.
        final_hidden_states: output of the routed experts, ``[tokens, dim]``.
    """
    gate = torch.mv(hidden_states.float(), gate_weight.float()).sigmoid_().unsqueeze(-1)
    torch.addcmul(final_hidden_states, gate, shared_output.float(), out=final_hidden_states)
