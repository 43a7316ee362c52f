"""Kernels of sampling: penalties in one pass over the logits, filters, and seeded draws in parts of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_dflash.ops.kernels import assert_dense


@triton.jit(do_not_specialize=["draft_tokens", "rows", "width", "draft_stride"])
def penalize_block_kernel(
    logits,
    draft_tokens,
    counts,
    rows,
    coefficients,
    vocab,
    width,
    logits_stride,
    draft_stride,
    LANES: tl.constexpr,
):
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


def penalize_block(logits: Tensor, draft_tokens: Tensor, counts: Tensor, rows: Tensor, coefficients: Tensor) -> None:
    bs, width, vocab = logits.shape
    # A vocabulary padded for tensor parallelism leaves a gap after each row of logits.
    assert logits.stride(2) == 1 and logits.stride(0) == width * logits.stride(1)
    assert draft_tokens.stride(1) == 1, "rows must be dense"
    assert_dense(counts, rows, coefficients)
    if bs:
        lanes = min(1024, triton.next_power_of_2(vocab))
        penalize_block_kernel[(bs * width, triton.cdiv(vocab, lanes))](
            *(logits, draft_tokens, counts, rows, coefficients),
            *(vocab, width, logits.stride(1), draft_tokens.stride(0)),
            LANES=lanes,
            num_warps=4,
        )


def filter_probs(probs: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor) -> Tensor:
    # By SGLang's kernels, which need no sort. As in SGLang's joint sampling, top-k and top-p both read the whole
    # distribution. Only the support of the renormalised probabilities is used, so rounding changes no weight.
    from sglang_dflash.upstream import top_k_renorm_prob, top_p_renorm_prob  # SGLang defines them on CUDA only

    by_rank, by_mass = top_k_renorm_prob(probs, top_ks), top_p_renorm_prob(probs, top_ps)
    return keep_probs(probs, by_rank, by_mass, top_ps, min_ps)


@triton.jit(do_not_specialize=["probs", "by_rank", "by_mass", "largest", "top_ps", "min_ps", "stride"])
def keep_probs_kernel(
    probs, by_rank, by_mass, largest, top_ps, min_ps, kept, vocab, stride, LANES: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * LANES + tl.arange(0, LANES)
    mask, at = token < vocab, row * vocab + token
    value = tl.load(probs + row * stride + token, mask=mask, other=0.0)
    keep = (tl.load(by_rank + at, mask=mask, other=0.0) > 0) & (value >= tl.load(largest + row) * tl.load(min_ps + row))
    mass = tl.load(by_mass + at, mask=mask, other=0.0)
    keep &= tl.where(tl.load(top_ps + row) >= 1, 1.0, mass) > 0
    tl.store(kept + at, tl.where(keep, value, 0.0), mask=mask)


def keep_probs(probs: Tensor, by_rank: Tensor, by_mass: Tensor, top_ps: Tensor, min_ps: Tensor) -> Tensor:
    assert probs.stride(1) == 1, "rows must be dense"
    assert_dense(by_rank, by_mass, top_ps, min_ps)
    rows, vocab = probs.shape
    kept = torch.empty_like(by_rank)
    if rows:
        lanes = min(1024, triton.next_power_of_2(vocab))
        keep_probs_kernel[(rows, triton.cdiv(vocab, lanes))](
            *(probs, by_rank, by_mass, probs.amax(dim=-1), top_ps, min_ps, kept, vocab, probs.stride(0)),
            LANES=lanes,
            num_warps=4,
        )
    return kept


@triton.jit
def repeat_entry(entries, repeated, row, to, mask):
    if entries is not None:
        tl.store(repeated + to, tl.load(entries + row), mask=mask)


@triton.jit(do_not_specialize=["first", "second", "third", "fourth", "fifth", "width"])
def repeat_rows_kernel(
    first, second, third, fourth, fifth, to_first, to_second, to_third, to_fourth, to_fifth, width, LANES: tl.constexpr
):
    row, lanes = tl.program_id(0), tl.arange(0, LANES)
    to, mask = row * width + lanes, lanes < width
    repeat_entry(first, to_first, row, to, mask)
    repeat_entry(second, to_second, row, to, mask)
    repeat_entry(third, to_third, row, to, mask)
    repeat_entry(fourth, to_fourth, row, to, mask)
    repeat_entry(fifth, to_fifth, row, to, mask)


def repeat_rows(*vectors: Tensor | None, width: int) -> tuple[Tensor | None, ...]:
    first = vectors[0]
    assert first is not None
    assert_dense(*(each for each in vectors if each is not None))
    repeated = [None if each is None else each.new_empty(len(each) * width, *each.shape[1:]) for each in vectors]
    if bs := len(first):
        lanes = max(32, triton.next_power_of_2(width))
        repeat_rows_kernel[(bs,)](*vectors, *repeated, width, LANES=lanes, num_warps=1)
    return tuple(repeated)


_LANES = 512  # tokens at once: with 1,024 a thread takes over 128 registers
_STRETCHES = 16  # of them, one after the other: a vocabulary of 248,320 takes 31 programs a row


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


@triton.jit(do_not_specialize=["seeds", "positions"])
def seeded_draw_kernel(
    weights, seeds, positions, times, winners, vocab, row_stride, LANES: tl.constexpr, STRETCHES: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    seed = tl.load(seeds + row)
    state = tl.full((), 0, tl.uint32)
    state = murmur_block(state, seed.to(tl.uint32))
    state = murmur_block(state, (seed >> 32).to(tl.uint32))
    state = murmur_block(state, tl.load(positions + row).to(tl.uint32))

    lanes = tl.arange(0, LANES)
    best_time = tl.full((LANES,), float("inf"), tl.float64)
    best_token = tl.zeros((LANES,), tl.int64)
    for stretch in range(STRETCHES):
        token = (part * STRETCHES + stretch) * LANES + lanes
        weight = tl.load(weights + row * row_stride + token, mask=token < vocab, other=0.0).to(tl.float64)
        if tl.max(weight, axis=0) > 0:  # filters leave most stretches of a vocabulary empty
            bits = murmur_finish(murmur_block(state, token.to(tl.uint32)))
            uniform = (bits.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2 ** -32
            time = tl.where(weight > 0, -tl.log(uniform) / weight, float("inf"))
            best_token = tl.where(time < best_time, token, best_token)
            best_time = tl.minimum(time, best_time)
    first, at = tl.min(best_time, axis=0), row * tl.num_programs(1) + part
    tl.store(times + at, first)
    tl.store(winners + at, tl.min(tl.where(best_time == first, best_token, vocab), axis=0))


def seeded_draw(weights: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    assert weights.stride(1) == 1, "rows must be dense"
    assert_dense(seeds, positions)
    rows, vocab = weights.shape
    lanes = min(_LANES, triton.next_power_of_2(vocab))
    parts = triton.cdiv(vocab, lanes * _STRETCHES)
    times = torch.empty(rows, parts, dtype=torch.float64, device=weights.device)
    winners = torch.empty(rows, parts, dtype=torch.int64, device=weights.device)
    if rows:
        seeded_draw_kernel[(rows, parts)](
            *(weights, seeds, positions, times, winners, vocab, weights.stride(0)),
            LANES=lanes,
            STRETCHES=_STRETCHES,
            num_warps=4,
        )
    return winners.gather(1, times.argmin(1, keepdim=True)).squeeze(1)  # of equal times, the first part's
