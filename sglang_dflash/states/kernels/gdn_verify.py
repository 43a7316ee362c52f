"""Triton kernel of :func:`sglang_dflash.states.reference.gdn_verify`: one program per (values, value head, request).

Three choices:

- Positions past the width read the inputs of the last position, so that every address is in bounds and every value
  defined. Positions within the width do not read them, and their results are not stored.
- The triangular system is solved by its inverse, assembled from the inverses of halves. Its entries are products of
  contractions (beta <= 1, keys of norm 1), so none exceeds 1 for any keys. The powers of the same matrix reach
  thousands and cancel (equal keys, no decay).
- fp32 activations are multiplied in fp32, because there a verify must choose the tokens of plain decoding. 16-bit
  queries and keys are multiplied on tensor cores and normalised afterwards, which is exact. An fp32 state is split into
  two 16-bit parts: the error is 2 ** -18 in bfloat16, against 2 ** -11 of one TF32 product of the same cost. Small fp32
  matrices use three-part TF32, about as precise as fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_dflash.ops.kernels import assert_dense
from sglang_dflash.states.reference import EPS, THRESHOLD, Records

# Values of a state [V, K] per program, and lanes per load. Twice as many of either take over 128 registers in some
# specialisation. Blocks of over 16 positions take 249, for the inverse of 32 x 32 in three TF32 parts (in one part
# 168).
_VALUES, _LANES = 32, 32


@triton.jit
def log1p(x):
    """``log(1 + x)`` for x >= 0; the quotient corrects the rounding of 1 + x."""
    rounded = 1.0 + x
    return tl.where(rounded == 1.0, x, tl.log(rounded) * (x / (rounded - 1.0)))


@triton.jit
def inverse_of_unit_lower(system, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    """``(I + system)^-1`` of a strictly lower triangular ``[2 ** LEVELS, 2 ** LEVELS]``."""
    STEPS: tl.constexpr = 2**LEVELS
    row = tl.arange(0, STEPS)[:, None]
    column = tl.arange(0, STEPS)[None, :]
    inverse = tl.where(row == column, 1.0, tl.where((row >> 1 == column >> 1) & (row > column), -system, 0.0))
    for level in tl.static_range(1, LEVELS):
        # Diagonal blocks of 2 ** level are inverted. For two of them, X and Y with C below X, write -Y C X at C.
        below = (row >> (level + 1) == column >> (level + 1)) & (row >> level > column >> level)
        product = tl.dot(tl.where(below, system, 0.0), inverse, input_precision=PRECISION)
        inverse -= tl.dot(inverse, product, input_precision=PRECISION)
    return inverse


@triton.jit
def record(high, low, start, offset, x, mask):
    rounded = x.to(high.dtype.element_ty)
    tl.store(high + start + offset, rounded, mask=mask)
    if low is not None:
        tl.store(low + start + offset, (x - rounded.to(tl.float32)).to(low.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["slots", "rows", "width", "value_heads", "group", "a_stride", "b_stride"])
def gdn_verify_kernel(
    q,
    k,
    v,
    a,
    b,
    A_log,
    dt_bias,
    states,
    slots,
    updates,
    updates_low,
    keys,
    keys_low,
    decays,
    rows,
    out,
    width,
    value_heads,
    group,
    scale,
    q_stride,
    k_stride,
    v_stride,
    a_stride,
    b_stride,
    state_stride,
    update_stride,
    key_stride,
    decay_stride,
    K: tl.constexpr,
    V: tl.constexpr,
    RING: tl.constexpr,
    LEVELS: tl.constexpr,
    LANES: tl.constexpr,
    VALUES: tl.constexpr,
    EPS: tl.constexpr,
    THRESHOLD: tl.constexpr,
    ROUND_BETA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    STEPS: tl.constexpr = 2**LEVELS
    tile = tl.program_id(0)
    head = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    key_head = head // group
    slot = tl.load(slots + request).to(tl.int64)
    step = tl.arange(0, STEPS)
    in_block = step < width
    value = tile * VALUES + tl.arange(0, VALUES)[None, :]
    written = in_block[:, None] & (value < V)
    first = request * width  # token; offsets from it, and within a state or a row of the records, fit 32 bits
    out += (first * value_heads + head) * V
    if slot < 0:
        zeros = tl.zeros((STEPS, VALUES), out.dtype.element_ty)
        tl.store(out + step[:, None] * (value_heads * V) + value, zeros, mask=written)
        return

    # Queries and keys against the state and against the keys, before they are normalised.
    token = tl.minimum(step, width - 1)
    q_at = q + first * q_stride + key_head * K + (token * q_stride)[:, None]
    k_at = k + first * k_stride + key_head * K + (token * k_stride)[:, None]
    state_at = states + slot * state_stride + (head * V + tl.trans(value)) * K
    q_squares = tl.zeros((STEPS,), tl.float32)
    k_squares = tl.zeros((STEPS,), tl.float32)
    read = tl.zeros((STEPS, VALUES), tl.float32)
    erased = tl.zeros((STEPS, VALUES), tl.float32)
    scores = tl.zeros((STEPS, STEPS), tl.float32)
    overlaps = tl.zeros((STEPS, STEPS), tl.float32)
    for start in range(0, K, LANES):
        lane = start + tl.arange(0, LANES)[None, :]
        queries = tl.load(q_at + lane, mask=lane < K, other=0.0)
        own_keys = tl.load(k_at + lane, mask=lane < K, other=0.0)
        state = tl.load(state_at + lane, mask=(lane < K) & (tl.trans(value) < V), other=0.0)
        q_squares += tl.sum(queries.to(tl.float32) * queries.to(tl.float32), axis=1)
        k_squares += tl.sum(own_keys.to(tl.float32) * own_keys.to(tl.float32), axis=1)
        scores = tl.dot(queries, tl.trans(own_keys), scores, input_precision="ieee")
        overlaps = tl.dot(own_keys, tl.trans(own_keys), overlaps, input_precision="ieee")
        rounded = state.to(q.dtype.element_ty)
        read = tl.dot(queries, tl.trans(rounded), read, input_precision="ieee")
        erased = tl.dot(own_keys, tl.trans(rounded), erased, input_precision="ieee")
        if q.dtype.element_ty != tl.float32 and states.dtype.element_ty != q.dtype.element_ty:
            rest = (state.to(tl.float32) - rounded.to(tl.float32)).to(q.dtype.element_ty)
            read = tl.dot(queries, tl.trans(rest), read)
            erased = tl.dot(own_keys, tl.trans(rest), erased)
    q_factor = (tl.rsqrt(q_squares + EPS) * scale)[:, None]
    k_factor = tl.rsqrt(k_squares + EPS)

    gate = tl.load(a + first * a_stride + head + token * a_stride).to(tl.float32)
    gate += tl.load(dt_bias + head).to(tl.float32)
    softplus = tl.where(gate <= THRESHOLD, log1p(tl.exp(tl.minimum(gate, THRESHOLD))), gate)
    g = -tl.exp(tl.load(A_log + head).to(tl.float32)) * softplus
    beta = tl.sigmoid(tl.load(b + first * b_stride + head + token * b_stride).to(tl.float32))
    if ROUND_BETA:
        beta = beta.to(b.dtype.element_ty).to(tl.float32)
    beta = beta[:, None]

    # Sum the decays between two writes directly: see decay_between in states/reference.py.
    later = step[:, None] > step[None, :]
    decay = tl.exp(tl.cumsum(tl.where(later, g[:, None], 0.0), axis=0)) * k_factor[None, :]
    decay_in = tl.exp(tl.cumsum(g, axis=0))[:, None]
    system = tl.where(later, overlaps * decay * (beta * k_factor[:, None]), 0.0)
    scores = tl.where(step[:, None] >= step[None, :], scores * decay * q_factor, 0.0)
    v_at = v + first * v_stride + head * V + (token * v_stride)[:, None]
    values = tl.load(v_at + value, mask=value < V, other=0.0).to(tl.float32)
    values = (values - erased * (decay_in * k_factor[:, None])) * beta
    inverse = inverse_of_unit_lower(system, LEVELS, PRECISION)
    writes = tl.dot(inverse, values, input_precision=PRECISION)
    result = tl.dot(scores, writes, read * (decay_in * q_factor), input_precision=PRECISION)
    tl.store(out + step[:, None] * (value_heads * V) + value, result.to(out.dtype.element_ty), mask=written)

    row = tl.load(rows + request).to(tl.int64)
    updates_at = row * update_stride + head * RING * V
    record(updates, updates_low, updates_at, step[:, None] * V + value, writes, written)
    if tile == 0:
        tl.store(decays + row * decay_stride + head * RING + step, g, mask=in_block)
        if head % group == 0:
            for start in range(0, K, LANES):
                lane = start + tl.arange(0, LANES)[None, :]
                normalized = tl.load(k_at + lane, mask=lane < K, other=0.0).to(tl.float32) * k_factor[:, None]
                keys_at = row * key_stride + key_head * RING * K
                record(keys, keys_low, keys_at, step[:, None] * K + lane, normalized, in_block[:, None] & (lane < K))


def gdn_verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    slots: Tensor,
    records: Records,
    rows: Tensor,
    *,
    width: int,
    scale: float,
    round_beta: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    # Tokens, slots and rows may have gaps between them.
    assert_dense(A_log, dt_bias, slots, rows, *(x[:1] for x in (q, k, v, a, b, states, *records.parts)))
    records.assert_alike()
    (tokens, H, K), (HV, V), ring = q.shape, v.shape[1:], records.updates.shape[2]
    assert tokens == len(slots) * width and width <= ring
    out = torch.empty((tokens, HV, V), dtype=q.dtype, device=q.device) if out is None else out
    assert out.is_contiguous() and out.shape == (tokens, HV, V)
    if tokens:
        # Sized by the block, not the ring: on a server with wide blocks a narrow one takes a third of the registers.
        levels = max(4, (width - 1).bit_length())
        # Twice the positions with as many values would spill.
        values = min(_VALUES if levels == 4 else _VALUES // 2, max(16, triton.next_power_of_2(V)))
        gdn_verify_kernel[(triton.cdiv(V, values), HV, len(slots))](
            q,
            k,
            v,
            a,
            b,
            A_log,
            dt_bias,
            states,
            slots,
            records.updates,
            records.updates_low,
            records.keys,
            records.keys_low,
            records.decays,
            rows,
            out,
            width,
            HV,
            HV // H,
            scale,
            *(x.stride(0) for x in (q, k, v, a, b, states, records.updates, records.keys, records.decays)),
            K=K,
            V=V,
            RING=ring,
            LEVELS=levels,
            LANES=min(_LANES, max(16, triton.next_power_of_2(K))),
            VALUES=values,
            EPS=EPS,
            THRESHOLD=THRESHOLD,
            ROUND_BETA=round_beta,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32x3",
            num_warps=4,
        )
    return out
