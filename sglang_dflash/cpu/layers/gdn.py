"""Gated delta rule on a pool of states: decode (one token per request) and verify (a block per request).

There are H key heads and HV value heads; value head j reads key head ``j // (HV / H)``. The pool is
``[slots, HV, V, K]``, and states are advanced in fp32 whatever its dtype. A slot < 0 is padding: see
``mamba_state``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from sglang_dflash.cpu.layers import gdn_block, gdn_record
from sglang_dflash.cpu.layers.mamba_state import live_slots


def l2_normalize(x: torch.Tensor) -> torch.Tensor:
    """``x / sqrt(sum(x^2) + 1e-6)`` over the last dimension, the norm of queries and keys."""
    return x * x.square().sum(-1, keepdim=True).add_(1e-6).rsqrt_()


def _log_decay(
    A_log: torch.Tensor, a: torch.Tensor, dt_bias: torch.Tensor, beta: float = 1.0, threshold: float = 20.0
) -> torch.Tensor:
    """``g = -exp(A_log) * softplus(a + dt_bias)`` in fp32, the shape of ``a``."""
    step = F.softplus(a.float() + dt_bias.float(), beta, threshold)
    return step.mul_(A_log.float().exp()).neg_()


def gates(
    A_log: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    dt_bias: torch.Tensor,
    beta: float = 1.0,
    threshold: float = 20.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-decay and write strength for a prefill.

    Args:
        A_log, dt_bias: ``[HV]``; a, b: ``[tokens, HV]``.
        beta, threshold: of the softplus.

    Returns:
        ``g`` and ``sigmoid(b)``, fp32 ``[1, tokens, HV]``.
    """
    return _log_decay(A_log, a, dt_bias, beta, threshold).unsqueeze(0), b.float().sigmoid().unsqueeze(0)


def decode(
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    scale: float,
    initial_state: torch.Tensor,
    out: torch.Tensor,
    ssm_state_indices: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
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
        qk = l2_normalize(qk)
    heads = bs * qk.shape[2]
    q, k = (part.reshape(heads, 1, K) for part in qk.unbind(1))
    v = mixed_qkv[:, v_start:].float().view(bs, HV, V)

    slots = live_slots(ssm_state_indices)
    state = initial_state.index_select(0, slots).float()
    state.mul_(_log_decay(A_log, a, dt_bias).exp_().view(bs, HV, 1, 1))
    # The value heads of one key head are rows of one [HV / H * V, K] matrix: nothing to repeat.
    rows = state.view(heads, -1, K)
    u = (v - torch.bmm(rows, k.mT).view(bs, HV, V)).mul_(b.float().sigmoid().unsqueeze(-1))
    rows.baddbmm_(u.view(heads, -1, 1), k)
    torch.mul(torch.bmm(rows, q.mT).view(out.shape), scale, out=out)
    initial_state.index_copy_(0, slots, state.to(initial_state.dtype))
    return out, initial_state


def verify(
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    softplus_beta: float,
    softplus_threshold: float,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    *,
    disable_state_update: bool = False,
    intermediate_states_buffer: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
    retrieve_parent_token: torch.Tensor | None = None,
    is_kda: bool = False,
    cache_ring: bool = False,
    **unused: Any,
) -> torch.Tensor:
    """Run a block of T tokens per request; keep what the commit needs of every token, and leave the pool as it is.

    Args:
        A_log, dt_bias: ``[HV]``; a, b: ``[bs * T, HV]``; softplus_beta, softplus_threshold: of the decay.
        q, k: ``[1, bs * T, H, K]``; v: ``[1, bs * T, HV, V]``. All requests have the same T.
        initial_state_source: the pool; initial_state_indices: slot of each request, ``[bs]``.
        scale: factor of the queries, ``K ** -0.5`` by default.
        cu_seqlens: ``[bs + 1]``; only its length is read.
        intermediate_states_buffer: ``[rows, block, HV, V, K]``, block >= T; written by :mod:`gdn_record`.
        intermediate_state_indices: row of each request in it, at least ``[bs]``.
        retrieve_parent_token: given for draft trees, which are refused.
        unused: parameters of the upstream kernel for other models.

    Returns:
        Outputs in the shape of ``v`` and the dtype of ``q``.
    """
    unsupported = is_kda or cache_ring or not disable_state_update or retrieve_parent_token is not None
    if unsupported or intermediate_states_buffer is None:
        raise NotImplementedError("on a CPU, fused_sigmoid_gating_delta_rule_update runs the verify of GDN chains only")
    assert cu_seqlens is not None and intermediate_state_indices is not None
    bs = cu_seqlens.shape[0] - 1
    HV, V, K = initial_state_source.shape[1:]

    def by_head(x: torch.Tensor, *widths: int) -> torch.Tensor:
        """``[bs * T, heads, ...]`` to fp32 ``[bs, heads, T, ...]``."""
        return x.reshape(bs, -1, *widths).transpose(1, 2).float()

    q, k = (by_head(x, *x.shape[2:]) for x in (q, k))
    if use_qk_l2norm_in_kernel:
        q, k = l2_normalize(q), l2_normalize(k)
    if k.shape[1] != HV:
        q, k = (x.repeat_interleave(HV // x.shape[1], 1) for x in (q, k))
    g = by_head(_log_decay(A_log, a, dt_bias, softplus_beta, softplus_threshold), HV)
    beta = by_head(b, HV).sigmoid()
    state = initial_state_source.index_select(0, live_slots(initial_state_indices)).float()
    block = gdn_block.prepare(q * (scale or K**-0.5), k, by_head(v, HV, V), g, beta)
    outputs, writes = gdn_block.apply(block, state)
    gdn_record.keep(intermediate_states_buffer, intermediate_state_indices[:bs].long(), block, writes)
    # [bs, HV, T, V] -> [bs, T, HV, V]
    return outputs.transpose(1, 2).reshape(v.shape).to(v.dtype)
