"""Sampling kernels: penalties in one pass over the logits, and seeded draws."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dflash.ops.kernels import assert_dense


@triton.jit(do_not_specialize=["draft_tokens", "rows", "width", "draft_stride"])
def penalize_block_kernel(
    logits, draft_tokens, counts, rows, coefficients, vocab, width, logits_stride, draft_stride, LANES: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64) // width
    position = tl.program_id(0) % width
    row = tl.load(rows + request).to(tl.int64)
    token = tl.program_id(1) * LANES + tl.arange(0, LANES)
    mask = token < vocab

    n = tl.load(counts + row * vocab + token, mask=mask, other=0)
    for j in range(1, position + 1):
        n += (token == tl.load(draft_tokens + request * draft_stride + j)).to(tl.int32)

    value_at = logits + tl.program_id(0).to(tl.int64) * logits_stride + token
    value = tl.load(value_at, mask=mask, other=0.0)
    frequency = tl.load(coefficients + row * 3)
    presence = tl.load(coefficients + row * 3 + 1)
    repetition = tl.load(coefficients + row * 3 + 2)
    generated = n > 0
    value = value - frequency * n - tl.where(generated, presence, 0.0)
    scale = tl.where(generated, repetition, 1.0)
    tl.store(value_at, tl.where(value < 0, value * scale, value / scale), mask=mask)


def penalize_block(logits, draft_tokens, counts, rows, coefficients):
    bs, width, vocab = logits.shape
    # a vocabulary padded for tensor parallelism leaves a gap after each row
    assert logits.stride(2) == 1 and logits.stride(0) == width * logits.stride(1)
    assert draft_tokens.stride(1) == 1, "rows must be dense"
    assert_dense(counts, rows, coefficients)
    if bs:
        lanes = min(1024, triton.next_power_of_2(vocab))
        penalize_block_kernel[(bs * width, triton.cdiv(vocab, lanes))](
            logits, draft_tokens, counts, rows, coefficients, vocab, width, logits.stride(1), draft_tokens.stride(0),
            LANES=lanes, num_warps=4,
        )  # fmt: skip


_LANES = 512  # tokens per tile: with 1,024 a thread of the race takes over 128 registers
_STRETCHES = 16  # tiles per program
_SCRATCH = 1 << 25  # weights filtered at once
_ONE = tl.constexpr(0x3F800000)  # bits of 1.0; positive numbers have the order of their bits


@triton.jit
def rotate_left(word, BITS: tl.constexpr):
    return (word << BITS) | (word >> (32 - BITS))


@triton.jit
def murmur_block(state, word):
    word = rotate_left(word * 0xCC9E2D51, 15) * 0x1B873593
    return rotate_left(state ^ word, 13) * 5 + 0xE6546B64


@triton.jit
def murmur_finish(state):
    state = state ^ 16
    state = (state ^ (state >> 16)) * 0x85EBCA6B
    state = (state ^ (state >> 13)) * 0xC2B2AE35
    return state ^ (state >> 16)


@triton.jit
def hash_state(seed, position):
    state = murmur_block(tl.full((), 0, tl.uint32), seed.to(tl.uint32))
    state = murmur_block(state, (seed >> 32).to(tl.uint32))
    return murmur_block(state, position.to(tl.uint32))


@triton.jit
def uniform_of(state, token):
    bits = murmur_finish(murmur_block(state, token.to(tl.uint32)))
    return (bits.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2 ** -32


@triton.jit
def float_of(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def tile_scores(logits, row, tile, temperatures, vocab, row_stride, LANES: tl.constexpr):
    token = tile * LANES + tl.arange(0, LANES)
    score = tl.load(logits + row * row_stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    return tl.div_rn(score, tl.load(temperatures + row))


@triton.jit(do_not_specialize=["temperatures"])
def tile_stats_kernel(
    logits, temperatures, largest, masses, vocab, row_stride, tiles, LANES: tl.constexpr, STRETCHES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    for stretch in range(STRETCHES):
        tile = tl.program_id(1) * STRETCHES + stretch
        if tile < tiles:
            score = tile_scores(logits, row, tile, temperatures, vocab, row_stride, LANES)
            most = tl.max(score, axis=0)
            tl.store(largest + row * tiles + tile, most)
            mass = tl.sum(tl.exp(score - tl.where(most == float("-inf"), 0.0, most)), axis=0)
            tl.store(masses + row * tiles + tile, mass)


@triton.jit(do_not_specialize=["temperatures", "top_ks", "top_ps", "min_ps", "first"])
def limits_kernel(
    logits, temperatures, top_ks, top_ps, min_ps, largest, masses, weights, limits, first, vocab, row_stride, tiles,
    LANES: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    row = first + tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES)
    peak = tl.load(largest + row * tiles + tile, mask=tile < tiles, other=float("-inf"))
    most, limit = tl.max(peak, axis=0), tl.full((), 0, tl.float32)
    if top_ks is not None:
        top_k, top_p, limit = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_ps + row)
        if (top_k < vocab) | (top_p < 1):
            peak = tl.exp(peak - most)
            mass = tl.load(masses + row * tiles + tile, mask=tile < tiles, other=0.0) * peak
            total = tl.sum(mass, axis=0)
            # from the tiles alone, the largest weight below which every token is surely cut
            low, high = tl.full((), 0, tl.int32), tl.full((), _ONE, tl.int32)
            for _ in range(30):
                middle = low + (high - low + 1) // 2
                below = tl.sum(
                    tl.where(peak < float_of(middle), mass, tl.minimum(mass, LANES * float_of(middle))), axis=0
                )
                above = tl.sum((peak >= float_of(middle)).to(tl.int32), axis=0)
                cuts = (above >= top_k) | (below < (1 - top_p) * total * 0.99)
                low = tl.where(cuts, middle, low)
                high = tl.where(cuts, high, middle - 1)
            floor = tl.maximum(float_of(low), limit)
            # gather the weights from there on
            weights += tl.program_id(0).to(tl.int64) * vocab
            count = tl.full((), 0, tl.int32)
            for each in range(tiles):
                if tl.exp(tl.load(largest + row * tiles + each) - most) >= floor:
                    weight = tl.exp(tile_scores(logits, row, each, temperatures, vocab, row_stride, LANES) - most)
                    kept = ((weight >= floor) & (each * LANES + tl.arange(0, LANES) < vocab)).to(tl.int32)
                    tl.store(weights + count + tl.cumsum(kept, axis=0) - kept, weight, mask=kept > 0)
                    count += tl.sum(kept, axis=0)
            tl.debug_barrier()  # threads read what others wrote
            # the smallest weight above which fewer than top-k tokens lie, with at most top-p of the mass
            low, high = tl.maximum(low, 0), tl.full((), _ONE, tl.int32)
            for _ in range(30):
                middle = low + (high - low) // 2
                above, mass_above = tl.full((), 0, tl.int32), tl.full((), 0, tl.float32)
                for start in range(0, count, 4 * LANES):  # a flat distribution keeps the whole vocabulary
                    at = start + tl.arange(0, 4 * LANES)
                    weight = tl.load(weights + at, mask=at < count, other=0.0)
                    weight = tl.where(weight > float_of(middle), weight, 0.0)
                    above += tl.sum((weight > 0).to(tl.int32), axis=0)
                    mass_above += tl.sum(weight, axis=0)
                stays = (above < top_k) & ((mass_above <= top_p * total) | (top_p >= 1))
                high = tl.where(stays, middle, high)
                low = tl.where(stays, low, middle + 1)
            limit = tl.maximum(limit, float_of(high))
    tl.store(limits + row * 2, most)
    tl.store(limits + row * 2 + 1, limit)


@triton.jit(do_not_specialize=["temperatures", "top_ks", "seeds", "positions"])
def race_kernel(
    logits, temperatures, top_ks, seeds, positions, largest, limits, times, winners, vocab, row_stride, tiles,
    LANES: tl.constexpr, STRETCHES: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    greedy = False
    if top_ks is not None:
        greedy = tl.load(top_ks + row) == 1
    state = hash_state(tl.load(seeds + row), tl.load(positions + row))

    most, limit = tl.load(limits + row * 2), tl.load(limits + row * 2 + 1)
    best_time = tl.full((LANES,), float("inf"), tl.float64)
    best_token = tl.zeros((LANES,), tl.int64)
    for stretch in range(STRETCHES):
        tile = part * STRETCHES + stretch
        token = tile * LANES + tl.arange(0, LANES)
        peak = tl.load(largest + row * tiles + tile, mask=tile < tiles, other=float("-inf"))
        if (tl.exp(peak - most) >= limit) & (peak > float("-inf")):  # filters leave most tiles empty
            score = tile_scores(logits, row, tile, temperatures, vocab, row_stride, LANES)
            weight = tl.exp(score - most)
            uniform = tl.where(greedy, 0.5, uniform_of(state, token))  # all arrive at once: the first token wins
            runs = tl.where(greedy, score == most, (weight >= limit) & (weight > 0))
            time = tl.where(runs, -tl.log(uniform) / weight.to(tl.float64), float("inf"))
            best_token = tl.where(time < best_time, token, best_token)
            best_time = tl.minimum(time, best_time)
    first, at = tl.min(best_time, axis=0), row * tl.num_programs(1) + part
    tl.store(times + at, first)
    tl.store(winners + at, tl.min(tl.where(best_time == first, best_token, vocab), axis=0))


def seeded_tokens(logits, temperatures, filters, seeds, positions):
    # later kernels read only the tiles in which a token may be kept
    assert logits.stride(1) == 1, "rows must be dense"
    assert_dense(temperatures, seeds, positions, *(filters or ()))
    (count, vocab), device = logits.shape, logits.device
    lanes = min(_LANES, triton.next_power_of_2(vocab))
    tiles, parts = triton.cdiv(vocab, lanes), triton.cdiv(vocab, lanes * _STRETCHES)
    largest, masses = (torch.empty(count, tiles, device=device) for _ in range(2))
    limits = torch.empty(count, 2, device=device)
    times = torch.empty(count, parts, dtype=torch.float64, device=device)
    winners = torch.empty(count, parts, dtype=torch.int64, device=device)
    top_ks, top_ps, min_ps = filters or (None, None, None)
    if count:
        read, shape = (logits, temperatures), (vocab, logits.stride(0), tiles)
        split = {"LANES": lanes, "STRETCHES": _STRETCHES, "num_warps": 4}
        tile_stats_kernel[(count, parts)](*read, largest, masses, *shape, **split)
        most = min(count, max(1, _SCRATCH // vocab)) if filters else count
        weights = None if filters is None else torch.empty(most, vocab, device=device)
        for first in range(0, count, most):
            limits_kernel[(min(most, count - first),)](
                *read, top_ks, top_ps, min_ps, largest, masses, weights, limits, first, *shape,
                LANES=lanes, TILES=triton.next_power_of_2(tiles), num_warps=4,
            )  # fmt: skip
        race_kernel[(count, parts)](*read, top_ks, seeds, positions, largest, limits, times, winners, *shape, **split)
    return winners.gather(1, times.argmin(1, keepdim=True)).squeeze(1)  # of equal times, the first part's
