"""Mamba2's selective state space on a pool of states: prefill, decode (a token per request), verify (a block).

A token's state is ``exp(dt A) h + dt x B``, and its output ``h C + D x`` (Dao and Gu, "Transformers are SSMs", 2024).
Shapes: heads ``H``, groups of heads ``G``, head dim ``P``, state ``N``; pool ``[slots, H, P, N]``. States advance in
fp32. A slot < 0 is padding.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from sglang_dflash_cpu.layers.pools import live_slots


def _advance(h: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> tuple[Tensor, Tensor]:
    # One token: h [..., H, P, N]; x [..., H, P]; dt and D broadcast to x, A to h; B, C [..., G, N].
    heads = x.shape[-2] // B.shape[-2]
    B, C = (each.float().repeat_interleave(heads, -2).unsqueeze(-2) for each in (B, C))
    x = x.float()
    h = h * torch.exp(dt.unsqueeze(-1) * A) + (dt * x).unsqueeze(-1) * B
    return h, (h * C).sum(-1) + D * x


def update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    *,
    dt_bias: Tensor,
    state_batch_indices: Tensor,
    out: Tensor,
    disable_state_update: bool = False,
    intermediate_states_buffer: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    **unused: Any,
) -> None:
    """Advance every request by one token, or by a block whose states are stored instead.

    Args:
        state: the pool; updated in place unless ``disable_state_update``; state_batch_indices: slots ``[bs]``.
        x, dt: ``[bs, H, P]``, or ``[bs, T, H, P]`` in a verify; B, C: ``[bs, G, N]`` or ``[bs, T, G, N]``.
        A: ``[H, P, N]``; D, dt_bias: ``[H, P]``.
        out: shape of ``x``, written in place.
        intermediate_states_buffer: verify only, ``[rows, block >= T, H, P, N]``, the states after each token, written
            in place; intermediate_state_indices: row of each request in it, ``[bs]``.
    """
    if x.dim() == 3:
        x, dt, B, C, out = (each.unsqueeze(1) for each in (x, dt, B, C, out))
    slots, dt = live_slots(state_batch_indices), softplus(dt.float() + dt_bias)
    h = state.index_select(0, slots).float()
    for t in range(x.shape[1]):
        h, y = _advance(h, x[:, t], dt[:, t], A, B[:, t], C[:, t], D)
        out[:, t] = y.to(out.dtype)
        if intermediate_states_buffer is not None and intermediate_state_indices is not None:
            intermediate_states_buffer[intermediate_state_indices.long(), t] = h.to(intermediate_states_buffer.dtype)
    if not disable_state_update:
        state.index_copy_(0, slots, h.to(state.dtype))


def prefill(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor,
    *,
    dt_bias: Tensor,
    cu_seqlens: Tensor,
    out: Tensor,
    initial_states: Tensor | None = None,
    track_seq_idx: Tensor | None = None,
    track_end_locs: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run the new tokens of several sequences.

    Args:
        x: ``[1, tokens, H, P]``; dt: ``[1, tokens, H]``; B, C: ``[1, tokens, G, N]``; A, D, dt_bias: ``[H]``.
        chunk_size: tokens between the states that are returned.
        cu_seqlens: first token of each sequence, then the end, ``[sequences + 1]``.
        out: shape of ``x``, written in place.
        initial_states: ``[sequences, H, P, N]``; zeros by default.
        track_seq_idx, track_end_locs: sequences whose state before a token is returned too, and that token ``[n]``.

    Returns:
        States before every multiple of ``chunk_size``, fp32 ``[1, chunks, H, P, N]``; after each sequence,
            ``[sequences, H, P, N]``; and the tracked ones, ``[1, n, H, P, N]`` or None.
    """
    shape, dt = (*x.shape[2:], B.shape[-1]), softplus(dt[0].float() + dt_bias)
    chunks, ends = x.new_zeros(1, -(-x.shape[1] // chunk_size), *shape, dtype=torch.float32), []
    places: Any = ()
    if track_end_locs is not None and track_seq_idx is not None:
        places = torch.stack((track_seq_idx, track_end_locs), 1)
    tracked = chunks.new_zeros(1, len(places), *shape)
    wanted = {tuple(place.tolist()): number for number, place in enumerate(places)}
    for sequence, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        h = chunks.new_zeros(shape) if initial_states is None else initial_states[sequence].float()
        for t in range(start, end):
            if t % chunk_size == 0:
                chunks[0, t // chunk_size] = h
            if (sequence, t) in wanted:
                tracked[0, wanted[sequence, t]] = h
            h, y = _advance(h, x[0, t], dt[t, :, None], A[:, None, None], B[0, t], C[0, t], D[:, None])
            out[0, t] = y.to(out.dtype)
        if (sequence, end) in wanted:
            tracked[0, wanted[sequence, end]] = h
        ends.append(h)
    return chunks, torch.stack(ends), tracked if wanted else None
