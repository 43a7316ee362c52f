"""Gated delta rule on a pool of states: decode (one token per request) and verify (a block per request).

There are H key heads and HV value heads; value head j reads key head ``j // (HV / H)``. The pool is
``[slots, HV, V, K]``, and states are advanced in fp32 whatever its dtype. A slot < 0 is padding: see
:mod:`mamba_state`.

Beta is rounded to the dtype of its input, as in SGLang's Triton kernels of decoding and prefill.

A prefill is :mod:`gdn_chunk`. The closed form that it shares with the verify is :mod:`gdn_block`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_dflash_cpu.layers import gdn_block
from sglang_dflash_cpu.layers.mamba_state import live_slots


def l2_normalize(x: Tensor) -> Tensor:
    """``x / sqrt(sum(x^2) + 1e-6)`` over the last dimension, the norm of queries and keys."""
    return x * x.square().sum(-1, keepdim=True).add_(1e-6).rsqrt_()


def per_value_head(q: Tensor, k: Tensor, heads: int, *, scale: float | None, normalize: bool) -> tuple[Tensor, Tensor]:
    """Queries, scaled, and keys as each of ``heads`` value heads reads them.

    Args:
        q, k: fp32, heads in dimension 1, elements of a head in the last.
        heads: HV.
        scale: factor of the queries, ``K ** -0.5`` by default.
        normalize: whether to divide both by their norm first.
    """
    if normalize:
        q, k = l2_normalize(q), l2_normalize(k)
    q = q * (scale or k.shape[-1] ** -0.5)
    if k.shape[1] != heads:
        q, k = (x.repeat_interleave(heads // x.shape[1], 1) for x in (q, k))
    return q, k


def _log_decay(A_log: Tensor, a: Tensor, dt_bias: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """``g = -exp(A_log) * softplus(a + dt_bias)`` in fp32, the shape of ``a``."""
    step = F.softplus(a.float() + dt_bias.float(), beta, threshold)
    return step.mul_(A_log.float().exp()).neg_()


def _beta(b: Tensor) -> Tensor:
    """``sigmoid(b)``, rounded to the dtype of ``b``, as fp32."""
    return b.sigmoid().float()


def decay_and_strength(
    A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor, beta: float = 1.0, threshold: float = 20.0
) -> tuple[Tensor, Tensor]:
    """Log-decay and write strength for a prefill.

    Args:
        A_log, dt_bias: ``[HV]``; a, b: ``[tokens, HV]``.
        beta, threshold: of the softplus.

    Returns:
        ``g`` and beta, fp32 ``[1, tokens, HV]``.
    """
    return _log_decay(A_log, a, dt_bias, beta, threshold).unsqueeze(0), _beta(b).unsqueeze(0)


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
        qk = l2_normalize(qk)
    heads = bs * qk.shape[2]
    q, k = (part.reshape(heads, 1, K) for part in qk.unbind(1))
    v = mixed_qkv[:, v_start:].float().view(bs, HV, V)

    slots = live_slots(ssm_state_indices)
    state = initial_state.index_select(0, slots).float()
    state.mul_(_log_decay(A_log, a, dt_bias).exp_().view(bs, HV, 1, 1))
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
    """Run a block of T tokens per request; keep what the commit needs of every token, and leave the pool as it is.

    Args:
        A_log, dt_bias: ``[HV]``; a, b: ``[bs * T, HV]``; softplus_beta, softplus_threshold: of the decay.
        q, k: ``[1, bs * T, H, K]``; v: ``[1, bs * T, HV, V]``. All requests have the same T.
        initial_state_source: the pool; initial_state_indices: slot of each request, ``[bs]``.
        scale: factor of the queries, ``K ** -0.5`` by default.
        cu_seqlens: ``[bs + 1]``; only its length is read.
        intermediate_states_buffer: ``[rows, block, HV, V, K]``, block >= T; written by :func:`.gdn_block.keep`.
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

    def by_head(x: Tensor, *widths: int) -> Tensor:
        """``[bs * T, heads, ...]`` to fp32 ``[bs, heads, T, ...]``."""
        return x.reshape(bs, -1, *widths).transpose(1, 2).float()

    q, k = (by_head(x, *x.shape[2:]) for x in (q, k))
    q, k = per_value_head(q, k, HV, scale=scale, normalize=use_qk_l2norm_in_kernel)
    g = by_head(_log_decay(A_log, a, dt_bias, softplus_beta, softplus_threshold), HV)
    beta = by_head(_beta(b), HV)
    state = initial_state_source.index_select(0, live_slots(initial_state_indices)).float()
    block = gdn_block.prepare(q, k, by_head(v, HV, V), g, beta)
    outputs, writes = gdn_block.apply(block, state)
    gdn_block.keep(intermediate_states_buffer, intermediate_state_indices[:bs].long(), block, writes)
    # [bs, HV, T, V] -> [bs, T, HV, V]
    return outputs.transpose(1, 2).reshape(v.shape).to(v.dtype)
