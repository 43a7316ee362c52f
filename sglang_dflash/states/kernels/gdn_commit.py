"""Triton kernel of :func:`~sglang_dflash.states.reference.gdn_commit`: a program per (values, request, layer).

Positions past a count read the last counted one, with weight zero, so records of an older block are never read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_dflash.ops.kernels import assert_dense
from sglang_dflash.states.reference import Records

# Values of a state [V, K] per program, and lanes per load. With 64 lanes a thread takes over 128 registers.
_VALUES, _LANES = 64, 32


@triton.jit
def write_state(
    state_at,
    target_at,
    update_at,
    update_low_at,
    key_at,
    key_low_at,
    decays,
    count,
    in_values,
    K: tl.constexpr,
    V: tl.constexpr,
    STEPS: tl.constexpr,
    LANES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Advance some values of a state by the first ``count`` > 0 tokens of a block.

    The addresses are those of the values' rows ``[VALUES, 1]``, and of the first token's values ``[1, VALUES]`` and
    key.
    """
    step = tl.arange(0, STEPS)
    token = tl.minimum(step, count - 1)
    # Sum the decays after each token directly: see decay_between in states/reference.py.
    following = tl.load(decays + tl.minimum(step + 1, count - 1))
    later = tl.cumsum(tl.where(step + 1 < count, following, 0.0), axis=0, reverse=True)
    weight = tl.where(step < count, tl.exp(later), 0.0)[:, None]
    decay = tl.exp(tl.sum(tl.where(step < count, tl.load(decays + token), 0.0), axis=0))

    mask = tl.trans(in_values)
    update = tl.load(update_at + token[:, None] * V, mask=mask, other=0.0).to(tl.float32)
    if update_low_at is not None:
        update += tl.load(update_low_at + token[:, None] * V, mask=mask, other=0.0).to(tl.float32)
    terms = tl.trans(update * weight)
    for start in range(0, K, LANES):
        lane = start + tl.arange(0, LANES)[None, :]
        key = tl.load(key_at + token[:, None] * K + lane, mask=lane < K, other=0.0).to(tl.float32)
        if key_low_at is not None:
            key += tl.load(key_low_at + token[:, None] * K + lane, mask=lane < K, other=0.0).to(tl.float32)
        state = tl.load(state_at + lane, mask=in_values & (lane < K), other=0.0).to(tl.float32)
        state = tl.dot(terms, key, state * decay, input_precision=PRECISION)
        tl.store(target_at + lane, state.to(target_at.dtype.element_ty), mask=in_values & (lane < K))


@triton.jit(do_not_specialize=["rows", "slots", "counts", "track_slots", "track_counts", "value_heads", "group"])
def gdn_commit_kernel(
    states,
    updates,
    updates_low,
    keys,
    keys_low,
    decays,
    rows,
    slots,
    counts,
    track_slots,
    track_counts,
    value_heads,
    group,
    state_layer,
    state_slot,
    update_layer,
    update_row,
    key_layer,
    key_row,
    decay_layer,
    decay_row,
    K: tl.constexpr,
    V: tl.constexpr,
    RING: tl.constexpr,
    STEPS: tl.constexpr,
    LANES: tl.constexpr,
    VALUES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile = tl.program_id(0) // value_heads
    head = (tl.program_id(0) % value_heads).to(tl.int64)
    request = tl.program_id(1)
    layer = tl.program_id(2).to(tl.int64)
    slot = tl.load(slots + request).to(tl.int64)
    if slot < 0:
        return
    row = tl.load(rows + request).to(tl.int64)
    value = tile * VALUES + tl.arange(0, VALUES)[:, None]
    value_at = states + layer * state_layer + (head * V + value) * K
    update_at = layer * update_layer + row * update_row + head * RING * V + tl.trans(value)
    key_at = layer * key_layer + row * key_row + (head // group) * RING * K
    decays += layer * decay_layer + row * decay_row + head * RING
    updates += update_at
    keys += key_at
    if updates_low is not None:
        updates_low += update_at
        keys_low += key_at

    # Tracked states first: they also start from the state before the block.
    if track_slots is not None:
        track_slot = tl.load(track_slots + request).to(tl.int64)
        track_count = tl.load(track_counts + request).to(tl.int32)
        if (track_slot >= 0) & (track_count > 0):
            write_state(
                value_at + slot * state_slot, value_at + track_slot * state_slot, updates, updates_low, keys, keys_low,
                decays, track_count, value < V, K, V, STEPS, LANES, PRECISION,
            )  # fmt: skip
    count = tl.load(counts + request).to(tl.int32)
    if count > 0:
        write_state(
            value_at + slot * state_slot, value_at + slot * state_slot, updates, updates_low, keys, keys_low,
            decays, count, value < V, K, V, STEPS, LANES, PRECISION,
        )  # fmt: skip


def gdn_commit(
    states: Tensor,
    records: Records,
    rows: Tensor,
    slots: Tensor,
    counts: Tensor,
    track_slots: Tensor | None = None,
    track_counts: Tensor | None = None,
) -> None:
    track = () if track_slots is None or track_counts is None else (track_slots, track_counts)
    assert_dense(rows, slots, counts, *track, *(x[:1, :1] for x in (states, *records.parts)))
    records.assert_alike()
    layers, _, HV, V, K = states.shape
    ring = records.updates.shape[3]
    if len(slots):
        values = min(_VALUES, max(16, triton.next_power_of_2(V)))
        gdn_commit_kernel[(triton.cdiv(V, values) * HV, len(slots), layers)](
            states,
            records.updates,
            records.updates_low,
            records.keys,
            records.keys_low,
            records.decays,
            rows,
            slots,
            counts,
            *(track or (None, None)),
            HV,
            HV // records.keys.shape[2],
            *(stride for x in (states, *records.parts[:3]) for stride in x.stride()[:2]),
            K=K,
            V=V,
            RING=ring,
            STEPS=max(16, triton.next_power_of_2(ring)),
            LANES=min(_LANES, max(16, triton.next_power_of_2(K))),
            VALUES=values,
            PRECISION="ieee" if records.keys.dtype == torch.float32 else "tf32x3",
            num_warps=4,
            num_stages=2,  # with three, tracking of bf16 states spills on sm_120
        )
