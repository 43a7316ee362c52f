"""Kernels of DFlash2: the convolution, one program per position and 1024 channels; and the walk, one per request."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_dflash.ops.kernels import assert_dense

_CHANNELS = 1024  # eight per thread


@triton.jit(do_not_specialize=["corrections", "width"])
def convolve_block_kernel(
    hidden,
    base,
    corrections,
    out,
    row_stride,
    tap_stride,
    width,
    HIDDEN: tl.constexpr,
    GROUP: tl.constexpr,
    TAPS: tl.constexpr,
    LANES: tl.constexpr,
):
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


def convolve_block(hidden: Tensor, base: Tensor, corrections: Tensor, *, width: int) -> Tensor:
    assert corrections.stride(2) == 1, "corrections of a tap must be dense"
    assert_dense(hidden, base)
    (rows, channels), (_, taps, groups) = hidden.shape, corrections.shape
    out = torch.empty_like(hidden)
    if rows:
        lanes = min(_CHANNELS, triton.next_power_of_2(channels))
        convolve_block_kernel[(rows, triton.cdiv(channels, lanes))](
            *(hidden, base, corrections, out, corrections.stride(0), corrections.stride(1), width),
            HIDDEN=channels,
            GROUP=channels // groups,
            TAPS=taps,
            LANES=lanes,
            num_warps=4,
        )
    return out


def top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    # FlashInfer's, deterministic and for dense rows; torch's where SGLang lacks FlashInfer.
    from sglang_dflash.upstream.worker import _radix_topk

    values, index = _radix_topk(logits.contiguous(), k)
    return values, index.long()


@triton.jit(do_not_specialize=["anchors", "anchor_stride", "positions"])
def walk_candidates_kernel(
    candidates,
    unary,
    gates,
    anchors,
    predecessors,
    successors,
    tokens,
    leads,
    anchor_stride,
    positions,
    TOP_K: tl.constexpr,
    RANK: tl.constexpr,
    CHOICES: tl.constexpr,
    LANES: tl.constexpr,
):
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
        # Only the chosen token's successors are scored, not all pairs: K * R numbers are read per position.
        last = tl.sum(tl.where(choice == best, ids, 0), axis=0)
        tl.store(tokens + row, last)
        tl.store(leads + row, tl.max(scores, axis=0) - second)


def walk_candidates(
    candidates: Tensor, unary: Tensor, gates: Tensor, anchors: Tensor, predecessors: Tensor, successors: Tensor
) -> tuple[Tensor, Tensor]:
    assert_dense(candidates, unary, gates, predecessors, successors)
    (bs, positions, top_k), rank = candidates.shape, predecessors.shape[1]
    tokens = candidates.new_empty(bs, positions)
    leads = unary.new_empty(bs, positions)
    if bs:
        walk_candidates_kernel[(bs,)](
            *(candidates, unary, gates, anchors, predecessors, successors, tokens, leads),
            *(anchors.stride(0), positions),
            TOP_K=top_k,
            RANK=rank,
            CHOICES=(choices := triton.next_power_of_2(top_k)),
            LANES=(lanes := triton.next_power_of_2(rank)),
            num_warps=min(max(choices * lanes // 1024, 1), 16),
        )
    return tokens, leads
