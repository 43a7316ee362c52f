"""Triton kernels of copied blocks: append to a history, find a match, replace drafts by what followed the match.

Definitions: ``note_tokens``, ``find_copies`` and ``offer_copies`` in :mod:`sglang_dflash.ops.reference`. One program
per request; the search has one per tile of positions as well.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sglang_dflash.ops.kernels import assert_dense

TILE = 2048


def assert_histories(history: Tensor, found: Tensor) -> None:
    """Assert dense rows, and that ``found`` has two columns."""
    assert history.stride(1) == 1 and found.stride() == (2, 1), (history.stride(), found.stride())


@triton.jit(do_not_specialize=["rows", "seq_lens", "tokens", "columns", "history_stride", "tokens_stride", "width"])
def note_tokens_kernel(
    history, found, rows, seq_lens, tokens, columns, history_stride, tokens_stride, width, LANES: tl.constexpr
):
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + request).to(tl.int64)
    offsets = tl.arange(0, LANES)
    in_block = offsets < width
    token = tl.load(tokens + request * tokens_stride + offsets, mask=in_block, other=0)
    position = tl.load(seq_lens + request).to(tl.int64) + 1 + offsets
    tl.store(history + row * history_stride + position, token.to(tl.int32), mask=in_block & (position < columns - 1))
    tl.store(found + row * 2, tl.zeros((), dtype=tl.int64))


def note_tokens(history: Tensor, found: Tensor, rows: Tensor, seq_lens: Tensor, tokens: Tensor) -> None:
    assert_histories(history, found)
    assert_dense(rows, seq_lens, tokens[:1].flatten())
    bs, width = tokens.shape
    if bs:
        note_tokens_kernel[(bs,)](
            *(history, found, rows, seq_lens, tokens),
            *(history.shape[1], history.stride(0), tokens.stride(0), width),
            LANES=max(32, triton.next_power_of_2(width)),
            num_warps=1,
        )


@triton.jit(do_not_specialize=["rows", "last", "history_stride"])
def find_copies_kernel(history, found, rows, last, history_stride, LONGEST: tl.constexpr, TILE: tl.constexpr):
    request = tl.program_id(0)
    newest = tl.load(last + request).to(tl.int64)
    first = tl.program_id(1) * TILE
    if first < newest:  # the grid is made for the longest request
        row = tl.load(rows + request).to(tl.int64)
        tokens = history + row * history_stride
        ends = first + tl.arange(0, TILE)
        alive = ends < newest
        lengths = tl.zeros((TILE,), dtype=tl.int32)
        for back in tl.static_range(LONGEST):
            wanted = tl.load(tokens + newest - back, mask=newest >= back, other=-1)
            alive = alive & (ends >= back) & (wanted >= 0)
            alive = alive & (tl.load(tokens + ends - back, mask=alive, other=-1) == wanted)
            lengths += alive.to(tl.int32)
        keys = tl.where(lengths > 0, (lengths.to(tl.int64) << 32) + ends, 0)
        tl.atomic_max(found + row * 2, tl.max(keys, axis=0))


def find_copies(history: Tensor, found: Tensor, rows: Tensor, last: Tensor, *, longest: int, bound: int) -> None:
    assert_histories(history, found)
    assert_dense(rows, last)
    if len(rows):
        grid = (len(rows), triton.cdiv(min(bound, history.shape[1] - 1), TILE))
        find_copies_kernel[grid](history, found, rows, last, history.stride(0), LONGEST=longest, TILE=TILE)


@triton.jit(
    do_not_specialize=["tokens", "margins", "rows", "last", "columns", "history_stride", "margins_stride", "width"]
)
def offer_copies_kernel(
    tokens,
    margins,
    history,
    found,
    rows,
    last,
    columns,
    history_stride,
    margins_stride,
    width,
    LEAST: tl.constexpr,
    UNSURE: tl.constexpr,
    LANES: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + request).to(tl.int64)
    key = tl.load(found + row * 2)
    length, end = key >> 32, key & 0xFFFFFFFF
    period = tl.maximum(tl.load(last + request).to(tl.int64) - end, 1)
    offsets = tl.arange(0, LANES)
    is_draft = offsets < width - 1
    at = tokens + request * width + 1 + offsets
    draft = tl.load(at, mask=is_draft, other=0)
    position = end + 1 + offsets % period
    copied = is_draft & (position < columns) & (length >= LEAST)
    copy = tl.load(history + row * history_stride + position, mask=copied, other=-1).to(tl.int64)
    copy = tl.where(copy >= 0, copy, draft)
    first = tl.min(tl.where(copy != draft, offsets, LANES), axis=0)
    margin = tl.load(margins + request * margins_stride + first, mask=first < LANES, other=float("inf"))
    taken = (first < LANES) & (margin < UNSURE)
    tl.store(found + row * 2 + 1, tl.where(taken, first + 1, 0).to(tl.int64))
    tl.store(at, copy, mask=is_draft & taken)


def offer_copies(
    tokens: Tensor,
    margins: Tensor,
    history: Tensor,
    found: Tensor,
    rows: Tensor,
    last: Tensor,
    *,
    least: int,
    unsure: float,
) -> None:
    assert_histories(history, found)
    assert margins.stride(1) == 1, margins.stride()
    assert_dense(rows, last, tokens.view(-1))
    bs, width = tokens.shape
    if bs:
        offer_copies_kernel[(bs,)](
            *(tokens, margins, history, found, rows, last),
            *(history.shape[1], history.stride(0), margins.stride(0), width),
            LEAST=least,
            UNSURE=unsure,
            LANES=max(32, triton.next_power_of_2(width)),
            num_warps=1,
        )
