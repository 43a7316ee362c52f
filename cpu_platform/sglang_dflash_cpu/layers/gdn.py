"""Gated delta net on a pool of states: prefill, decode (one token per request), verify (a block per request).

Formulas: :mod:`sglang_dflash.states.reference`. Shapes: H key heads, HV value heads; pool ``[slots, HV, V, K]``. States
advance in fp32. A slot < 0 is padding. Beta is rounded to its input's dtype, as in SGLang's Triton decode and prefill.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from sglang_dflash.states.reference import THRESHOLD, Records, gdn_block, gdn_verify, log_decay, normalized
from sglang_dflash_cpu.layers.pools import live_slots

CHUNK_SIZE = 64  # tokens; SGLang tracks prefixes at these boundaries


def decay_and_strength(
    A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor, beta: float = 1.0, threshold: float = THRESHOLD
) -> tuple[Tensor, Tensor]:
    """Return a prefill's log-decay and write strength, fp32 ``[1, tokens, HV]``.

    Args:
        A_log, dt_bias: ``[HV]``; a, b: ``[tokens, HV]``; beta, threshold: of the softplus.
    """
    return log_decay(A_log, a, dt_bias, beta, threshold).unsqueeze(0), b.sigmoid().float().unsqueeze(0)


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    scale: float | None = None,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    inplace_update: bool = True,
) -> tuple[Tensor, None, Tensor]:
    """Run the new tokens of several sequences, each from the state in its slot.

    Args:
        q, k: ``[1, tokens, H, K]``; v: ``[1, tokens, HV, V]``; g, beta: fp32 ``[1, tokens, HV]``.
        initial_state: the pool; updated in place if ``inplace_update``.
        initial_state_indices: slot of each sequence, ``[N]``.
        cu_seqlens: first token of each sequence, then the end, ``[N + 1]``.
        scale: of the queries, ``K ** -0.5`` by default.

    Returns:
        Outputs, the shape of ``v`` and the dtype of ``q``; None; and the states at the start of every chunk, sequence
            by sequence, fp32 ``[1, chunks, HV, V, K]``.
    """
    assert not head_first and q.shape[0] == 1
    q32, k32, v32, g, beta = (x.transpose(1, 2).float() for x in (q, k, v, g, beta))  # [1, heads, tokens, ...]
    if use_qk_l2norm_in_kernel:
        q32, k32 = normalized(q32), normalized(k32)
    q32 = q32 * (scale or k.shape[-1] ** -0.5)
    slots = live_slots(initial_state_indices)
    states = initial_state.index_select(0, slots).float()
    out, starts = torch.empty_like(v32), []
    for state, (first, end) in zip(states.split(1), pairwise(cu_seqlens.tolist()), strict=True):
        for start in range(first, end, CHUNK_SIZE):
            starts.append(state.clone())
            chunk = (slice(None), slice(None), slice(start, min(start + CHUNK_SIZE, end)))
            out[chunk], writes = gdn_block(q32[chunk], k32[chunk], v32[chunk], g[chunk], beta[chunk], state)
            # Column 0: all decays of the chunk; column i + 1: those after token i.
            size = writes.shape[2]
            decays = (g[chunk] @ g.new_ones(size, size + 1).tril_()).exp_().unsqueeze(-1)
            writes = (writes * decays[:, :, 1:]).mT.unflatten(1, (k.shape[2], -1)) @ k32[chunk].unsqueeze(2)
            state.mul_(decays[:, :, :1]).add_(writes.flatten(1, 2))
    if inplace_update:
        initial_state.index_copy_(0, slots, states.to(initial_state.dtype))
    return out.transpose(1, 2).to(q.dtype), None, torch.stack(starts, 1)


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
    """Advance every request by one token; return ``out`` and the pool.

    Args:
        mixed_qkv: ``[bs, H * K + H * K + HV * V]``; a, b: ``[bs, HV]``; A_log, dt_bias: ``[HV]``.
        scale: of the queries.
        initial_state: the pool, updated in place; ssm_state_indices: slot of each request, ``[bs]``.
        out: ``[bs, 1, HV, V]``, written in place.
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
    decay, beta = _gates(A_log, a, b, dt_bias)
    state.mul_(decay.view(bs, HV, 1, 1))
    # The value heads of a key head are rows of one [HV / H * V, K] matrix, so keys are not repeated.
    rows = state.view(heads, -1, K)
    u = (v - torch.bmm(rows, k.mT).view(bs, HV, V)).mul_(beta.unsqueeze(-1))
    rows.baddbmm_(u.view(heads, -1, 1), k)
    torch.mul(torch.bmm(rows, q.mT).view(out.shape), scale, out=out)
    initial_state.index_copy_(0, slots, state.to(initial_state.dtype))
    return out, initial_state


def _gates(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    # These operations do not depend on the number of rows; torch's softplus and sigmoid differ in a tensor's last
    # elements.
    x = a.float() + dt_bias.float()
    step = torch.where(x > THRESHOLD, x, x.exp().log1p_())
    beta = (-b.float()).exp_().add_(1).reciprocal_()
    return step.mul_(A_log.float().exp()).neg_().exp_(), beta.to(b.dtype).float()


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
    """Run a block of T tokens per request and store the state after each; the pool does not change.

    Args:
        A_log, dt_bias: ``[HV]``; a, b: ``[bs * T, HV]``; softplus_beta, softplus_threshold: of the decay.
        q, k: ``[1, bs * T, H, K]``; v and the result: ``[1, bs * T, HV, V]``.
        initial_state_source: the pool; initial_state_indices: slot of each request, ``[bs]``.
        scale: of the queries, ``K ** -0.5`` by default.
        cu_seqlens: ``[bs + 1]``; only its length is read.
        intermediate_states_buffer, intermediate_state_indices: ``[rows, block >= T, HV, V, K]``, written in place, and
            the row of each request, at least ``[bs]``.
    """
    softplus = (softplus_beta, softplus_threshold) == (1, THRESHOLD)
    chain = softplus and use_qk_l2norm_in_kernel and disable_state_update and intermediate_states_buffer is not None
    if not chain or is_kda or cache_ring or retrieve_parent_token is not None:
        raise NotImplementedError("on a CPU, fused_sigmoid_gating_delta_rule_update runs the verify of GDN chains only")
    assert not (cu_seqlens is None or intermediate_states_buffer is None or intermediate_state_indices is None)
    bs, H, (HV, V, K) = cu_seqlens.shape[0] - 1, q.shape[2], initial_state_source.shape[1:]
    width, slots = q.shape[1] // bs, live_slots(initial_state_indices)
    records = Records(torch.empty(bs, HV, width, V), torch.empty(bs, H, width, K), torch.empty(bs, HV, width))
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
    # Column orders from projections grouped by key head to q|k|v|z and b|a.
    ratio = heads_v // heads_qk

    def ungroup(*widths: int) -> Tensor:
        columns = torch.arange(heads_qk * sum(widths)).view(heads_qk, -1)
        return torch.cat([part.flatten() for part in columns.split(widths, dim=1)])

    return ungroup(head_qk, head_qk, ratio * head_v, ratio * head_v), ungroup(ratio, ratio)


def split_grouped(
    mixed_qkvz: Tensor, mixed_ba: Tensor, num_heads_qk: int, num_heads_v: int, head_qk: int, head_v: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split Qwen3-Next's projections, whose columns are grouped by key head: ``q|k|v|z`` and ``b|a`` of each.

    Returns:
        ``mixed_qkv [tokens, q|k|v]``, ``z [tokens, HV, V]``, ``b [tokens, HV]``, ``a [tokens, HV]``.
    """
    heads = (num_heads_qk, num_heads_v, head_qk, head_v)
    qkvz_order, ba_order = _ungrouped_columns(*heads)
    return split(mixed_qkvz.index_select(1, qkvz_order), mixed_ba.index_select(1, ba_order), *heads)


def split(
    mixed_qkvz: Tensor, mixed_ba: Tensor, num_heads_qk: int, num_heads_v: int, head_qk: int, head_v: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split Qwen3.5's projections, columns ``q|k|v|z`` and ``b|a``, into views; as :func:`split_grouped`."""
    qkv_width = 2 * num_heads_qk * head_qk + num_heads_v * head_v
    z = mixed_qkvz[:, qkv_width:].view(-1, num_heads_v, head_v)
    return mixed_qkvz[:, :qkv_width], z, mixed_ba[:, :num_heads_v], mixed_ba[:, num_heads_v:]
