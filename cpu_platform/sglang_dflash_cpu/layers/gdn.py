"""Gated delta rule on a pool of states: decode (one token per request), verify (a block per request), projections.

There are H key heads and HV value heads; value head j reads key head ``j // (HV / H)``. The pool is
``[slots, HV, V, K]``, and states are advanced in fp32 whatever its dtype. A slot < 0 is padding: see
:mod:`mamba_state`.

The mathematics is in :mod:`sglang_dflash.states.reference`, the prefill in :mod:`gdn_chunk`. Beta is rounded to the
dtype of its input, as in SGLang's Triton kernels of decoding and prefill.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from sglang_dflash.states.reference import THRESHOLD, Records, gdn_verify, log_decay, normalized
from sglang_dflash_cpu.layers.mamba_state import live_slots


def _beta(b: Tensor) -> Tensor:
    """``sigmoid(b)``, rounded to the dtype of ``b``, as fp32."""
    return b.sigmoid().float()


def decay_and_strength(
    A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor, beta: float = 1.0, threshold: float = THRESHOLD
) -> tuple[Tensor, Tensor]:
    """Log-decay and write strength for a prefill.

    Args:
        A_log, dt_bias: ``[HV]``; a, b: ``[tokens, HV]``.
        beta, threshold: of the softplus.

    Returns:
        ``g`` and beta, fp32 ``[1, tokens, HV]``.
    """
    return log_decay(A_log, a, dt_bias, beta, threshold).unsqueeze(0), _beta(b).unsqueeze(0)


def decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    initial_state: Tensor,
    out: Tensor,
    ssm_state_indices: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor]:
    """Advance every request by one token.

    Args:
        mixed_qkv: ``[bs, H * K + H * K + HV * V]``.
        a, b: gate inputs, ``[bs, HV]``; A_log, dt_bias: ``[HV]``.
        scale: factor of the queries.
        initial_state: the pool, updated in place.
        out: ``[bs, 1, HV, V]``, written in place.
        ssm_state_indices: slot of each request, ``[bs]``.

    Returns:
        ``out`` and the pool.
    """
    bs = mixed_qkv.shape[0]
    _, HV, V, K = initial_state.shape
    v_start = mixed_qkv.shape[1] - HV * V
    qk = mixed_qkv[:, :v_start].view(bs, 2, -1, K).float()
    if use_qk_l2norm_in_kernel:
        qk = normalized(qk)
    heads = bs * qk.shape[2]
    q, k = (part.reshape(heads, 1, K) for part in qk.unbind(1))
    v = mixed_qkv[:, v_start:].float().view(bs, HV, V)

    slots = live_slots(ssm_state_indices)
    state = initial_state.index_select(0, slots).float()
    state.mul_(log_decay(A_log, a, dt_bias).exp_().view(bs, HV, 1, 1))
    # The value heads of one key head are rows of one [HV / H * V, K] matrix: keys need not be repeated.
    rows = state.view(heads, -1, K)
    u = (v - torch.bmm(rows, k.mT).view(bs, HV, V)).mul_(_beta(b).unsqueeze(-1))
    rows.baddbmm_(u.view(heads, -1, 1), k)
    torch.mul(torch.bmm(rows, q.mT).view(out.shape), scale, out=out)
    initial_state.index_copy_(0, slots, state.to(initial_state.dtype))
    return out, initial_state


def verify(
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    softplus_beta: float,
    softplus_threshold: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    disable_state_update: bool = False,
    intermediate_states_buffer: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    retrieve_parent_token: Tensor | None = None,
    is_kda: bool = False,
    cache_ring: bool = False,
    **unused: Any,
) -> Tensor:
    """Run a block of T tokens per request and store the state after every one; leave the pool as it is.

    Args:
        A_log, dt_bias: ``[HV]``; a, b: ``[bs * T, HV]``; softplus_beta, softplus_threshold: of the decay.
        q, k: ``[1, bs * T, H, K]``; v: ``[1, bs * T, HV, V]``. All requests have the same T.
        initial_state_source: the pool; initial_state_indices: slot of each request, ``[bs]``.
        scale: factor of the queries, ``K ** -0.5`` by default.
        cu_seqlens: ``[bs + 1]``; only its length is read.
        intermediate_states_buffer: ``[rows, block, HV, V, K]``, block >= T; receives the state after each token.
        intermediate_state_indices: row of each request in it, at least ``[bs]``.
        retrieve_parent_token: given for draft trees, which are refused.
        unused: parameters of the upstream kernel for other models.

    Returns:
        Outputs in the shape of ``v`` and the dtype of ``q``.
    """
    tree = retrieve_parent_token is not None
    other = is_kda or cache_ring or not use_qk_l2norm_in_kernel or (softplus_beta, softplus_threshold) != (1, THRESHOLD)
    if tree or other or not disable_state_update or intermediate_states_buffer is None:
        raise NotImplementedError("on a CPU, fused_sigmoid_gating_delta_rule_update runs the verify of GDN chains only")
    assert cu_seqlens is not None and intermediate_state_indices is not None
    bs, H, (HV, V, K) = cu_seqlens.shape[0] - 1, q.shape[2], initial_state_source.shape[1:]
    width, slots = q.shape[1] // bs, live_slots(initial_state_indices)
    records = Records(
        torch.empty(bs, HV, width, V), torch.empty(bs, H, width, K), torch.empty(bs, HV, width), None, None
    )
    inputs = (q[0], k[0], v[0], a, b, A_log, dt_bias, initial_state_source, slots, records, torch.arange(bs))
    out = gdn_verify(*inputs, width=width, scale=scale or K**-0.5, round_beta=True)

    state = initial_state_source.index_select(0, slots).float()
    decays, keys = records.decays.exp()[..., None, None], records.keys.repeat_interleave(HV // H, 1)
    rows = intermediate_state_indices[:bs].long()
    for t in range(width):
        write = records.updates[:, :, t].unsqueeze(-1) * keys[:, :, t].unsqueeze(-2)
        state = torch.addcmul(write, state, decays[:, :, t])
        intermediate_states_buffer[:, t].index_copy_(0, rows, state.to(intermediate_states_buffer.dtype))
    return out.view(v.shape)


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
