"""Triton kernels inside the drafter's forward: norm and RoPE, DFlash2's convolution, and the choice of drafts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dflash.ops.kernels import assert_dense
from sglang_dflash.ops.kernels.sampling import hash_state, uniform_of
from sglang_dflash.ops.reference.model import GREEDY_VALUES, UNSURE

# heads of 128 values: eight values per thread of one warp; more would spill registers
_HEADS = 2
_CHANNELS = 1024  # eight per thread
_TILE = 1024  # logits
_TILES = 8  # per program of the first pass: eight 16-byte loads per thread
_LEAST = tl.constexpr(-0x80000000)  # below the order of every value


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


@triton.jit
def choose(scores, ids, row, request, place, noise, tokens, leads, UNSURE: tl.constexpr, CHOICES: tl.constexpr):
    """Store a row's draft, which is returned, and the lead of the best."""
    choice = tl.arange(0, CHOICES)
    best, most = tl.argmax(scores, axis=0), tl.max(scores, axis=0)
    second = tl.max(tl.where(choice == best, float("-inf"), scores), axis=0)
    tl.store(leads + row, most - second)
    if noise is not None:
        seeds, temperatures, top_ks, top_ps, min_ps = noise
        top_k, top_p = tl.load(top_ks + request), tl.load(top_ps + request)
        if (top_k != 1) & (1 / tl.sum(tl.exp(scores - most), axis=0) < UNSURE):
            scaled = tl.div_rn(scores, tl.load(temperatures + request))
            weight = tl.exp(scaled - tl.max(scaled, axis=0))
            larger = weight[None, :] > weight[:, None]
            ahead = larger | ((weight[None, :] == weight[:, None]) & (choice[None, :] < choice[:, None]))
            rank = tl.sum(ahead.to(tl.int32), axis=1)
            above = tl.sum(tl.where(ahead, weight[None, :], 0.0), axis=1)
            limit = tl.where(top_p >= 1, float("inf"), top_p * tl.sum(weight, axis=0))
            runs = (rank < top_k) & (above <= limit) & (weight >= tl.load(min_ps + request)) & (weight > 0)
            uniform = uniform_of(hash_state(tl.load(seeds + request), place), ids)
            best = tl.argmin(tl.where(runs, -tl.log(uniform) / weight.to(tl.float64), float("inf")), axis=0)
    token = tl.sum(tl.where(choice == best, ids, 0), axis=0)
    tl.store(tokens + row, token)
    return token


# Triton specialises the tensors of a tuple: those of the noise are the first entries of whole memory, so aligned
@triton.jit(do_not_specialize=["anchors", "places", "anchor_stride", "place_stride", "positions"])
def walk_candidates_kernel(
    candidates, unary, anchors, places, noise, codebooks, tokens, leads, anchor_stride, place_stride, positions,
    UNSURE: tl.constexpr, TOP_K: tl.constexpr, RANK: tl.constexpr, CHOICES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    choice, lane = tl.arange(0, CHOICES), tl.arange(0, LANES)
    is_choice, in_rank = choice < TOP_K, lane < RANK
    last, place = tl.load(anchors + request * anchor_stride), tl.load(places + request * place_stride)
    for position in range(tl.program_id(1), positions, tl.num_programs(1)):
        row = request * positions + position
        ids = tl.load(candidates + row * TOP_K + choice, mask=is_choice, other=0)
        scores = tl.load(unary + row * TOP_K + choice, mask=is_choice, other=float("-inf"))
        if codebooks is not None:
            gates, predecessors, successors = codebooks
            mask = is_choice[:, None] & in_rank[None, :]
            after = tl.load(successors + ids[:, None] * RANK + lane[None, :], mask=mask, other=0.0).to(tl.float32)
            gate = tl.load(gates + row * RANK + lane, mask=in_rank, other=0.0).to(tl.float32)
            key = tl.load(predecessors + last * RANK + lane, mask=in_rank, other=0.0).to(tl.float32) * gate
            scores += tl.sum(after * key[None, :], axis=1)
        # only the chosen token's successors are scored: K * R elements per position
        last = choose(scores, ids, row, request, place + position, noise, tokens, leads, UNSURE, CHOICES)


def walk_candidates(candidates, unary, anchors, positions, noise=None, codebooks=None):
    assert_dense(candidates, unary, *(noise or ()), *(codebooks or ()))
    bs, n, top_k = candidates.shape
    assert noise is None or min(map(len, noise)) >= bs, "a request without noise"
    rank = 0 if codebooks is None else codebooks[1].shape[1]
    tokens, leads = candidates.new_empty(bs, n), unary.new_empty(bs, n)
    choices, lanes = triton.next_power_of_2(top_k), triton.next_power_of_2(max(1, rank))
    if bs:
        # without codebooks no position waits for the one before
        walk_candidates_kernel[(bs, 1 if codebooks else n)](
            candidates, unary, anchors, positions, noise and tuple(noise), codebooks, tokens, leads, anchors.stride(0),
            positions.stride(0), n, UNSURE=UNSURE, TOP_K=top_k, RANK=rank, CHOICES=choices, LANES=lanes,
            num_warps=min(max(choices * lanes // 1024, 1), 16),
        )  # fmt: skip
    return tokens, leads


@triton.jit
def order_of(value):
    """Return int32 numbers with the order of the values: zeros are equal, and NaN is the largest."""
    bits = value.to(tl.int32, bitcast=True)
    bits = tl.where(bits == -0x80000000, 0, bits)
    return tl.where(value == value, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)


@triton.jit
def tile_largest_kernel(logits, largest, vocab, row_stride, tiles, LANES: tl.constexpr, TILES: tl.constexpr):
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILES + tl.arange(0, TILES)
    most = tl.full((TILES, LANES // 8), float("-inf"), tl.float32)
    for start in tl.static_range(0, LANES, LANES // 8):
        token = tile[:, None] * LANES + start + tl.arange(0, LANES // 8)[None, :]
        value = tl.load(logits + row * row_stride + token, mask=token < vocab, other=float("-inf"))
        most = tl.maximum(most, value.to(tl.float32), propagate_nan=tl.PropagateNan.ALL)
    tl.store(largest + row * tiles + tile, tl.max(order_of(most), axis=1), mask=tile < tiles)


@triton.jit(do_not_specialize=["places", "place_stride", "each"])
def leading_tokens_kernel(
    logits, largest, places, noise, values, tokens, place_stride, each, vocab, row_stride, tiles, UNSURE: tl.constexpr,
    TOP_K: tl.constexpr, GREEDY: tl.constexpr, CHOICES: tl.constexpr, LANES: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    row, tile, choice = tl.program_id(0).to(tl.int64), tl.arange(0, TILES), tl.arange(0, CHOICES)
    peak = tl.load(largest + row * tiles + tile, mask=tile < tiles, other=_LEAST)
    value_of, token_of = tl.full((CHOICES,), float("-inf"), tl.float32), tl.zeros((CHOICES,), tl.int64)
    wanted, request = TOP_K, row // each
    if noise is not None:
        wanted = tl.where(tl.load(noise[2] + request) == 1, GREEDY, TOP_K)
    before, first = tl.full((), 0x7FFFFFFF, tl.int32), tl.full((), -1, tl.int32)
    for i in range(wanted):
        most = tl.max(peak, axis=0)
        at = tl.min(tl.where(peak == most, tile, TILES), axis=0)
        token = at * LANES + tl.arange(0, LANES)
        value = tl.load(logits + row * row_stride + token, mask=token < vocab, other=float("-inf"))
        order = order_of(value.to(tl.float32))
        left = (order < before) | ((order == before) & (token > first))
        first = tl.min(tl.where(left & (order == most), token, vocab), axis=0)
        peak = tl.where(tile == at, tl.max(tl.where(left & (token != first), order, _LEAST), axis=0), peak)
        before = most
        bits = tl.where(most < 0, most ^ 0x7FFFFFFF, most)
        value_of = tl.where(choice == i, bits.to(tl.float32, bitcast=True), value_of)
        token_of = tl.where(choice == i, first.to(tl.int64), token_of)
    if places is None:
        tl.store(values + row * TOP_K + choice, value_of, mask=choice < TOP_K)
        tl.store(tokens + row * TOP_K + choice, token_of, mask=choice < TOP_K)
    else:
        place = tl.load(places + request * place_stride) + row % each
        choose(value_of, token_of, row, request, place, noise, tokens, values, UNSURE, CHOICES)


def leading_tokens(logits, k, noise=None, positions=None):
    assert logits.stride(1) == 1, f"rows must be dense: {logits.stride()[1:]}"
    assert_dense(*(noise or ()))
    (rows, vocab), stride = logits.shape, logits.stride(0)
    assert k <= vocab, f"{k} of {vocab} tokens"
    tiles, shape = triton.cdiv(vocab, _TILE), (rows, k) if positions is None else (rows,)
    largest = torch.empty(rows, tiles, dtype=torch.int32, device=logits.device)
    values, tokens = (torch.empty(shape, dtype=t, device=logits.device) for t in (torch.float32, torch.int64))
    if rows:
        grid = rows, triton.cdiv(tiles, _TILES)
        tile_largest_kernel[grid](logits, largest, vocab, stride, tiles, LANES=_TILE, TILES=_TILES, num_warps=4)
        leading_tokens_kernel[(rows,)](
            logits, largest, positions, noise and tuple(noise), values, tokens,
            0 if positions is None else positions.stride(0), 1 if noise is None else rows // len(noise.top_ks),
            vocab, stride, tiles, UNSURE=UNSURE, TOP_K=k, GREEDY=min(k, GREEDY_VALUES),
            CHOICES=triton.next_power_of_2(k), LANES=_TILE, TILES=triton.next_power_of_2(tiles), num_warps=4,
        )  # fmt: skip
    return values, tokens


def likeliest_tokens(logits, k, positions, noise):
    assert {*map(len, noise)} == {len(positions)}, "a request without noise"
    leads, tokens = leading_tokens(logits.flatten(0, 1), k, noise, positions)
    return tokens.view(logits.shape[:2]), leads.view(logits.shape[:2])
