"""Triton kernels inside the drafter's forward: norm and RoPE, DFlash2's convolution and its walk; also argmax."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dflash.ops.kernels import assert_dense

# heads of 128 values: eight values per thread of one warp; more would spill registers
_HEADS = 2
_CHANNELS = 1024  # eight per thread
_PART = 8 * _CHANNELS  # logits per program of argmax: eight 16-byte loads per thread


@triton.jit(do_not_specialize=["positions", "tokens"])
def norm_rope_kernel(
    heads, norm_weight, positions, cos_sin, out, eps, layer_stride, token_stride, head_stride, weight_layer_stride,
    weight_head_stride, angle_stride, tokens, num_heads, head_dim, rotary_dim, NEOX: tl.constexpr,
    HEADS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    layer = tl.program_id(2).to(tl.int64)
    lane = tl.arange(0, LANES)[None, :]
    mask = (head < num_heads) & (lane < head_dim)

    # each lane turns with a partner: the other half (neox) or the other member of its pair
    half = rotary_dim // 2
    turns = lane < rotary_dim
    if NEOX:
        leads = lane < half
        partner = tl.where(leads, lane + half, lane - half)
        angle = tl.where(leads, lane, lane - half)
    else:
        leads = lane % 2 == 0
        partner = tl.where(leads, lane + 1, lane - 1)
        angle = lane // 2
    partner = tl.where(turns, partner, lane)

    source = heads + token * token_stride + layer * layer_stride + head * head_stride
    own = tl.load(source + lane, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(source + partner, mask=mask, other=0.0).to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(own * own, axis=1, keep_dims=True) / head_dim + eps)
    scale = norm_weight + layer * weight_layer_stride + head * weight_head_stride
    own_scale = tl.load(scale + lane, mask=mask, other=0.0).to(tl.float32)
    other_scale = tl.load(scale + partner, mask=mask, other=0.0).to(tl.float32)
    own = own * inverse_rms * own_scale
    other = other * inverse_rms * other_scale

    angles = cos_sin + tl.load(positions + token).to(tl.int64) * angle_stride
    cos = tl.load(angles + angle, mask=turns, other=1.0).to(tl.float32)
    sin = tl.load(angles + half + angle, mask=turns, other=0.0).to(tl.float32)
    turned = own * cos + tl.where(leads, -other, other) * sin

    target = out + ((layer * tokens + token) * num_heads + head) * head_dim
    tl.store(target + lane, turned.to(out.dtype.element_ty), mask=mask)


def norm_rope(heads, norm_weight, eps, positions, cos_sin, *, neox=True):
    assert heads.stride(-1) == norm_weight.stride(-1) == cos_sin.stride(-1) == 1, "last dimensions must be dense"
    assert_dense(positions)
    layers, tokens, num_heads, head_dim = heads.shape
    out = torch.empty((layers, tokens, num_heads, head_dim), dtype=heads.dtype, device=heads.device)
    if tokens:
        tile = min(_HEADS, triton.next_power_of_2(num_heads))
        norm_rope_kernel[(tokens, triton.cdiv(num_heads, tile), layers)](
            heads, norm_weight, positions, cos_sin, out, eps,
            *heads.stride()[:3], *norm_weight.stride()[:2], cos_sin.stride(0),
            tokens, num_heads, head_dim, cos_sin.shape[1],
            NEOX=neox, HEADS=tile, LANES=triton.next_power_of_2(head_dim), num_warps=1,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["corrections", "width"])
def convolve_block_kernel(
    hidden, base, corrections, out, row_stride, tap_stride, width, HIDDEN: tl.constexpr, GROUP: tl.constexpr,
    TAPS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * LANES + tl.arange(0, LANES)
    in_row = channel < HIDDEN
    total = tl.zeros((LANES,), dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        in_block = in_row & (tap <= row % width)
        x = tl.load(hidden + (row - tap) * HIDDEN + channel, mask=in_block, other=0.0).to(tl.float32)
        shared = tl.load(base + tap * HIDDEN + channel, mask=in_row, other=0.0).to(tl.float32)
        place = corrections + row * row_stride + tap * tap_stride + channel // GROUP
        total += (shared + tl.load(place, mask=in_row, other=0.0).to(tl.float32)) * x
    tl.store(out + row * HIDDEN + channel, total.to(out.dtype.element_ty), mask=in_row)


def convolve_block(hidden, base, corrections, *, width):
    assert corrections.stride(2) == 1, "corrections of a tap must be dense"
    assert_dense(hidden, base)
    (rows, channels), (_, taps, groups) = hidden.shape, corrections.shape
    out = torch.empty_like(hidden)
    if rows:
        lanes = min(_CHANNELS, triton.next_power_of_2(channels))
        convolve_block_kernel[(rows, triton.cdiv(channels, lanes))](
            hidden, base, corrections, out, corrections.stride(0), corrections.stride(1), width,
            HIDDEN=channels, GROUP=channels // groups, TAPS=taps, LANES=lanes, num_warps=4,
        )  # fmt: skip
    return out


def top_k(logits, k):
    # FlashInfer's, deterministic and for dense rows; torch's where SGLang lacks FlashInfer
    from sglang_dflash.upstream.worker import _radix_topk

    values, index = _radix_topk(logits.contiguous(), k)
    return values, index.long()


@triton.jit(do_not_specialize=["anchors", "anchor_stride", "positions"])
def walk_candidates_kernel(
    candidates, unary, gates, anchors, predecessors, successors, tokens, leads, anchor_stride, positions,
    TOP_K: tl.constexpr, RANK: tl.constexpr, CHOICES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    choice, lane = tl.arange(0, CHOICES), tl.arange(0, LANES)
    is_choice, in_rank = choice < TOP_K, lane < RANK
    last = tl.load(anchors + request * anchor_stride)
    for position in range(positions):
        row = request * positions + position
        ids = tl.load(candidates + row * TOP_K + choice, mask=is_choice, other=0)
        mask = is_choice[:, None] & in_rank[None, :]
        after = tl.load(successors + ids[:, None] * RANK + lane[None, :], mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(gates + row * RANK + lane, mask=in_rank, other=0.0).to(tl.float32)
        key = tl.load(predecessors + last * RANK + lane, mask=in_rank, other=0.0).to(tl.float32) * gate
        scores = tl.load(unary + row * TOP_K + choice, mask=is_choice, other=float("-inf"))
        scores += tl.sum(after * key[None, :], axis=1)
        best = tl.argmax(scores, axis=0)
        second = tl.max(tl.where(choice == best, float("-inf"), scores), axis=0)
        # only the chosen token's successors are scored: K * R elements per position
        last = tl.sum(tl.where(choice == best, ids, 0), axis=0)
        tl.store(tokens + row, last)
        tl.store(leads + row, tl.max(scores, axis=0) - second)


def walk_candidates(candidates, unary, gates, anchors, predecessors, successors):
    assert_dense(candidates, unary, gates, predecessors, successors)
    (bs, positions, top_k), rank = candidates.shape, predecessors.shape[1]
    tokens = candidates.new_empty(bs, positions)
    leads = unary.new_empty(bs, positions)
    choices, lanes = triton.next_power_of_2(top_k), triton.next_power_of_2(rank)
    if bs:
        walk_candidates_kernel[(bs,)](
            candidates, unary, gates, anchors, predecessors, successors, tokens, leads, anchors.stride(0), positions,
            TOP_K=top_k, RANK=rank, CHOICES=choices, LANES=lanes, num_warps=min(max(choices * lanes // 1024, 1), 16),
        )  # fmt: skip
    return tokens, leads


@triton.jit
def order_of(value):
    """Return int32 numbers with the order of the values: zeros are equal, and NaN is the largest."""
    bits = value.to(tl.int32, bitcast=True)
    bits = tl.where(bits == -0x80000000, 0, bits)
    return tl.where(value == value, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)


@triton.jit
def part_largest_kernel(logits, largest, vocab, row_stride, LANES: tl.constexpr, PART: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    most = tl.full((LANES,), float("-inf"), tl.float32)
    for start in tl.static_range(0, PART, LANES):
        token = part * PART + start + tl.arange(0, LANES)
        value = tl.load(logits + row * row_stride + token, mask=token < vocab, other=float("-inf"))
        most = tl.maximum(most, value.to(tl.float32), propagate_nan=tl.PropagateNan.ALL)
    tl.store(largest + row * tl.num_programs(1) + part, tl.max(order_of(most), axis=0))


@triton.jit
def first_largest_kernel(logits, largest, tokens, vocab, row_stride, parts, PART: tl.constexpr, PARTS: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)
    peak = tl.load(largest + row * parts + part, mask=part < parts, other=-0x80000000)
    most = tl.max(peak, axis=0)
    token = tl.min(tl.where(peak == most, part, PARTS), axis=0) * PART + tl.arange(0, PART)
    value = tl.load(logits + row * row_stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    tl.store(tokens + row, tl.min(tl.where(order_of(value) == most, token, vocab), axis=0).to(tl.int64))


def argmax(logits):
    assert logits.stride(1) == 1, f"rows must be dense: {logits.stride()[1:]}"
    (rows, vocab), stride = logits.shape, logits.stride(0)
    part = min(_PART, max(_CHANNELS, triton.next_power_of_2(vocab)))
    parts = triton.cdiv(vocab, part)
    largest = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        part_largest_kernel[(rows, parts)](logits, largest, vocab, stride, LANES=_CHANNELS, PART=part, num_warps=4)
        split = {"PART": part, "PARTS": triton.next_power_of_2(parts)}
        first_largest_kernel[(rows,)](logits, largest, tokens, vocab, stride, parts, **split, num_warps=8)
    return tokens
