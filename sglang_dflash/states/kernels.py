"""Triton kernels of the gated delta rule, defined in :mod:`sglang_dflash.states.reference`.

Verify: one program per (values, value head, request).

- A program is one warp up to width 16. Half of its instructions are for [16, 16] matrices, which further warps would
  repeat, with operands exchanged through shared memory. In fp32 only eight warps have the registers.
- The triangular system is solved by its inverse, assembled from inverses of halves. Its entries are products of
  contractions (beta <= 1, keys of norm 1), so none exceeds 1; powers of the same matrix can reach thousands and cancel.
- 16-bit queries and keys are multiplied on tensor cores and normalised afterwards, which is exact. An fp32 state is
  split into two 16-bit parts: the error is 2 ** -18 in bfloat16, compared with 2 ** -11 of one TF32 product.

Commit: one program per (values, request, layer).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from sglang_dflash.ops.kernels import assert_dense, dependent_launch, fetch
from sglang_dflash.states.reference import EPS

# Values of a state [V, K] per program, and lanes per load. With more in a commit, a thread takes over 128 registers; a
# verify with more repeats less work but has too few warps to hide latencies.
_VERIFIED, _VERIFIED_LANES = 32, 16
_COMMITTED, _LANES = 64, 32


def lanes_of_key(size: int, most: int = _LANES) -> int:
    return min(most, max(16, triton.next_power_of_2(size)))


def precision(activations: Tensor) -> str:
    return "ieee" if activations.dtype == torch.float32 else "tf32x3"


def verify_stages(activations: Tensor) -> int:
    # with three, 8 bytes spill on sm_86 and sm_89
    return 2 if activations.is_cuda and driver.active.get_current_target().arch < 90 else 3


def most_registers(activations: Tensor) -> int | None:
    # 16 programs of one warp then share a multiprocessor: on 132 of them, one wave for 16 requests of 32 heads. With
    # this limit float16, and all dtypes from sm_100 on, spill; without one they take up to 174.
    if activations.dtype != torch.bfloat16 or not activations.is_cuda:
        return None
    return 128 if driver.active.get_current_target().arch <= 90 else None


@triton.jit
def split(x, dtype: tl.constexpr):
    # Two 16-bit parts of an fp32 value. An addition rounds the first one of bfloat16: conversions have a quarter of its
    # throughput, and take registers.
    if dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True) + 0x8000
        rounded = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        return rounded, (x - (bits & -0x10000).to(tl.float32, bitcast=True)).to(dtype)
    return x.to(dtype), (x - x.to(dtype).to(tl.float32)).to(dtype)


@triton.jit
def fetch_rows(at, K: tl.constexpr):
    for start in tl.static_range(0, K, 1024 // at.dtype.element_ty.primitive_bitwidth):
        fetch(at + start)


@triton.jit
def load(at, inside, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(at)
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def log1p(x):
    # of 0 <= x <= 1, as 2 artanh(x / (2 + x))
    ratio = x / (2.0 + x)
    series = 1.0 / 15
    for odd in tl.static_range(13, 0, -2):
        series = series * (ratio * ratio) + 1.0 / odd
    return 2.0 * ratio * series


@triton.jit
def multiply_add(a, b, c, PRECISION: tl.constexpr):
    # a @ b + c. No entry of a and b exceeds 1, so two fp16 parts are as precise as two TF32 parts: 2 ** -22.
    if PRECISION == "ieee":
        return tl.dot(a, b, c, input_precision="ieee")
    a_high, b_high = a.to(tl.float16), b.to(tl.float16)
    a_low = (a - a_high.to(tl.float32)).to(tl.float16)
    b_low = (b - b_high.to(tl.float32)).to(tl.float16)
    return tl.dot(a_high, b_high, tl.dot(a_high, b_low, tl.dot(a_low, b_high, c)))


@triton.jit
def inverse_of_unit_lower(negated, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    # (I - negated)^-1 of a strictly lower triangular [2 ** LEVELS, 2 ** LEVELS]. A result of a product is the left
    # operand of another one, or transposed the right one, without leaving its registers: hence both orientations.
    STEPS: tl.constexpr = 2**LEVELS
    row = tl.arange(0, STEPS)[:, None]
    column = tl.arange(0, STEPS)[None, :]
    inverse = tl.where(row == column, 1.0, tl.where((row >> 1 == column >> 1) & (row > column), negated, 0.0))
    transposed = tl.trans(inverse)
    zeros = tl.zeros((STEPS, STEPS), tl.float32)
    for level in tl.static_range(1, LEVELS):
        # Diagonal blocks of 2 ** level are inverted. For two of them, X and Y with C below X, write -Y C X at C.
        below = (row >> (level + 1) == column >> (level + 1)) & (row >> level > column >> level)
        product = multiply_add(transposed, tl.trans(tl.where(below, negated, 0.0)), zeros, PRECISION)
        before = inverse
        inverse = multiply_add(before, tl.trans(product), before, PRECISION)
        if level + 1 < LEVELS:
            transposed = multiply_add(product, tl.trans(before), transposed, PRECISION)
    return inverse


@triton.jit
def record(high, low, start, offset, x, mask):
    rounded = x.to(high.dtype.element_ty)
    tl.store(high + start + offset, rounded, mask=mask)
    if low is not None:
        tl.store(low + start + offset, (x - rounded.to(tl.float32)).to(low.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["slots", "rows", "width", "value_heads", "group", "a_stride", "b_stride"])
def gdn_verify_kernel(
    q, k, v, a, b, A_log, dt_bias, states, slots, updates, keys, decays, updates_low, keys_low, rows, out, width,
    value_heads, group, scale, q_stride, k_stride, v_stride, a_stride, b_stride, state_stride, update_stride,
    key_stride, decay_stride, K: tl.constexpr, V: tl.constexpr, RING: tl.constexpr, LEVELS: tl.constexpr,
    LANES: tl.constexpr, VALUES: tl.constexpr, EVEN: tl.constexpr, EPS: tl.constexpr, ROUND_BETA: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    STEPS: tl.constexpr = 2**LEVELS
    tile = tl.program_id(0)
    head = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    key_head = head // group
    slot = tl.load(slots + request).to(tl.int64)
    value = tile * VALUES + tl.arange(0, VALUES)[None, :]
    state_at = states + tl.maximum(slot, 0) * state_stride + (head * V + tl.trans(value)) * K
    if PDL and EVEN:
        fetch_rows(state_at, K)
    rate = tl.exp(tl.load(A_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head).to(tl.float32)
    if PDL:  # q, k, v, a and b are outputs of the kernel before; out and the records may still be read
        tl.extra.cuda.gdc_wait()
    step = tl.arange(0, STEPS)
    in_block = step < width
    written = in_block[:, None] & (value < V)
    first = request * width  # offsets from it, and within a state or a row of the records, fit 32 bits
    out += (first * value_heads + head) * V
    if slot < 0:
        zeros = tl.zeros((STEPS, VALUES), out.dtype.element_ty)
        tl.store(out + step[:, None] * (value_heads * V) + value, zeros, mask=written)
        return

    token = tl.minimum(step, width - 1)
    gate = tl.load(a + first * a_stride + head + token * a_stride).to(tl.float32) + bias
    strength = tl.load(b + first * b_stride + head + token * b_stride).to(tl.float32)
    # not yet normalised
    q_at = q + first * q_stride + key_head * K + (token * q_stride)[:, None]
    k_at = k + first * k_stride + key_head * K + (token * k_stride)[:, None]
    read = tl.zeros((VALUES, STEPS), tl.float32)
    erased = tl.zeros((VALUES, STEPS), tl.float32)
    zeros = tl.zeros((STEPS, STEPS), tl.float32)
    q_overlaps = zeros
    overlaps = zeros
    scores = zeros
    for start in range(0, K, LANES):
        lane = start + tl.arange(0, LANES)[None, :]
        queries = load(q_at + lane, lane < K, EVEN)
        own_keys = load(k_at + lane, lane < K, EVEN)
        state = load(state_at + lane, (lane < K) & (tl.trans(value) < V), EVEN)
        q_overlaps = tl.dot(queries, tl.trans(queries), q_overlaps, input_precision="ieee")
        scores = tl.dot(queries, tl.trans(own_keys), scores, input_precision="ieee")
        overlaps = tl.dot(own_keys, tl.trans(own_keys), overlaps, input_precision="ieee")
        if q.dtype.element_ty != tl.float32 and states.dtype.element_ty != q.dtype.element_ty:
            state, rest = split(state.to(tl.float32), q.dtype.element_ty)
            read = tl.dot(rest, tl.trans(queries), read)
            erased = tl.dot(rest, tl.trans(own_keys), erased)
        rounded = state.to(q.dtype.element_ty)
        read = tl.dot(rounded, tl.trans(queries), read, input_precision="ieee")
        erased = tl.dot(rounded, tl.trans(own_keys), erased, input_precision="ieee")
    v_at = v + first * v_stride + head * V + (token * v_stride)[:, None]
    values = load(v_at + value, value < V, EVEN)
    row = tl.load(rows + request).to(tl.int64)
    same = step[:, None] == step[None, :]
    q_factor = tl.rsqrt(tl.sum(tl.where(same, q_overlaps, 0.0), axis=1) + EPS) * scale
    k_squares = tl.where(same, overlaps, 0.0)
    k_factor = tl.rsqrt(tl.sum(k_squares, axis=1) + EPS)
    k_factor_of_column = tl.rsqrt(tl.sum(k_squares, axis=0) + EPS)

    g = -rate * (tl.maximum(gate, 0.0) + log1p(tl.exp(-tl.abs(gate))))
    beta = tl.sigmoid(strength)
    if ROUND_BETA:
        beta = beta.to(b.dtype.element_ty).to(tl.float32)

    # As decay_between in states/reference.py: in float64 a difference of sums keeps its precision.
    later = step[:, None] > step[None, :]
    since = tl.cumsum(g.to(tl.float64), axis=0)
    between = tl.where(later, (since[:, None] - since[None, :]).to(tl.float32), 0.0)
    decay = tl.exp(between) * k_factor_of_column[None, :]
    decay_in = tl.exp(since.to(tl.float32))
    negated = tl.where(later, overlaps * decay * -(beta * k_factor)[:, None], 0.0)
    scores = tl.where(step[:, None] >= step[None, :], scores * decay * q_factor[:, None], 0.0)
    inverse = inverse_of_unit_lower(negated, LEVELS, PRECISION)
    scores = multiply_add(scores, inverse, zeros, PRECISION)
    values = tl.trans(values).to(tl.float32) - erased * (decay_in * k_factor_of_column)[None, :]
    values *= beta[None, :]
    writes = tl.trans(tl.dot(values, tl.trans(inverse), input_precision=PRECISION))
    result = tl.dot(values, tl.trans(scores), read * (decay_in * q_factor)[None, :], input_precision=PRECISION)
    result = tl.trans(result.to(out.dtype.element_ty))
    tl.store(out + step[:, None] * (value_heads * V) + value, result, mask=written)

    updates_at = row * update_stride + head * RING * V
    record(updates, updates_low, updates_at, step[:, None] * V + value, writes, written)
    if tile == 0:
        tl.store(decays + row * decay_stride + head * RING + step, g, mask=in_block)
    if head % group == 0:
        for start in range(tile * LANES, K, tl.num_programs(0) * LANES):
            lane = start + tl.arange(0, LANES)[None, :]
            normalized = load(k_at + lane, lane < K, EVEN).to(tl.float32) * k_factor[:, None]
            keys_at = row * key_stride + key_head * RING * K
            record(keys, keys_low, keys_at, step[:, None] * K + lane, normalized, in_block[:, None] & (lane < K))


def gdn_verify(
    q, k, v, a, b, A_log, dt_bias, states, slots, records, rows, *, width, scale, round_beta=False,
):  # fmt: skip
    strided = q, k, v, a, b, states, *records.parts  # tokens, slots and rows may have gaps
    assert_dense(A_log, dt_bias, slots, rows, *(x[:1] for x in strided))
    records.assert_alike()
    (tokens, H, K), (HV, V), ring = q.shape, v.shape[1:], records.updates.shape[2]
    assert tokens == len(slots) * width and width <= ring
    out = torch.empty((tokens, HV, V), dtype=q.dtype, device=q.device)
    if not tokens:
        return out
    # a narrow block on a server with wide ones takes a third of the registers
    levels, halves = max(4, (width - 1).bit_length()), q.element_size() == 2
    one_warp = halves and levels == 4
    lanes = lanes_of_key(K, _VERIFIED_LANES)
    values = min(_VERIFIED if one_warp else _VERIFIED // 2, max(16, triton.next_power_of_2(V)))
    gdn_verify_kernel[(triton.cdiv(V, values), HV, len(slots))](
        q, k, v, a, b, A_log, dt_bias, states, slots, *records, rows, out, width, HV, HV // H, scale,
        *(x.stride(0) for x in strided[:9]),
        K=K, V=V, RING=ring, LEVELS=levels, LANES=lanes, VALUES=values, EVEN=K % lanes == 0 and V % values == 0,
        EPS=EPS, ROUND_BETA=round_beta, PRECISION=precision(q),
        num_warps=1 if one_warp else 4 if halves else 8,  # four warps spill in fp32
        num_stages=verify_stages(q), maxnreg=most_registers(q) if one_warp else None,
        **dependent_launch(),
    )  # fmt: skip
    return out


@triton.jit
def write_state(
    state_at, target_at, update_at, update_low_at, key_at, key_low_at, decays, count, in_values, K: tl.constexpr,
    V: tl.constexpr, STEPS: tl.constexpr, LANES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Advance some values of a state by the first ``count`` > 0 tokens of a block, from addresses of the values' rows
    # [VALUES, 1] and of the first token's values [1, VALUES] and key.
    step = tl.arange(0, STEPS)
    token = tl.minimum(step, count - 1)
    # as decay_between in states/reference.py
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
    states, updates, keys, decays, updates_low, keys_low, rows, slots, counts, track_slots, track_counts,
    value_heads, group, state_layer, state_slot, update_layer, update_row, key_layer, key_row, decay_layer,
    decay_row, K: tl.constexpr, V: tl.constexpr, RING: tl.constexpr, STEPS: tl.constexpr, LANES: tl.constexpr,
    VALUES: tl.constexpr, PRECISION: tl.constexpr, FETCH: tl.constexpr,
):  # fmt: skip
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
    if FETCH and V % VALUES == 0:
        fetch_rows(value_at + slot * state_slot, K)
    update_at = layer * update_layer + row * update_row + head * RING * V + tl.trans(value)
    key_at = layer * key_layer + row * key_row + (head // group) * RING * K
    decays += layer * decay_layer + row * decay_row + head * RING
    updates += update_at
    keys += key_at
    if updates_low is not None:
        updates_low += update_at
        keys_low += key_at

    # tracked states also start from the state before the block
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


def gdn_commit(states, records, rows, slots, counts, track_slots=None, track_counts=None):
    assert (track_slots is None) == (track_counts is None)
    vectors = rows, slots, counts, track_slots, track_counts
    assert_dense(*vectors, *(x[:1, :1] for x in (states, *records.parts)))
    records.assert_alike()
    layers, _, HV, V, K = states.shape
    ring = records.updates.shape[3]
    if len(slots):
        most = _COMMITTED if records.keys.element_size() == 2 else _COMMITTED // 2  # fp32 records spill on sm_86
        values = min(most, max(16, triton.next_power_of_2(V)))
        gdn_commit_kernel[(triton.cdiv(V, values) * HV, len(slots), layers)](
            states, *records, *vectors, HV, HV // records.keys.shape[2],
            *(stride for x in (states, *records[:3]) for stride in x.stride()[:2]),
            K=K, V=V, RING=ring, STEPS=max(16, triton.next_power_of_2(ring)), LANES=lanes_of_key(K), VALUES=values,
            PRECISION=precision(records.keys), FETCH=dependent_launch()["PDL"],
            num_warps=4, num_stages=2,  # with three, tracking of bf16 states spills on sm_120
        )  # fmt: skip
