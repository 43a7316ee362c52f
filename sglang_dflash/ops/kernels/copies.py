"""Triton kernels of copied blocks: one program per request, and per tile of positions in the search."""

from __future__ import annotations

import triton
import triton.language as tl

from sglang_dflash.ops.kernels import assert_dense, lanes_of

TILE = 2048


def assert_histories(history, found):
    assert history.stride(1) == 1 and found.stride() == (2, 1) and len(found) == len(history), found.stride()


@triton.jit(
    do_not_specialize=["rows", "seq_lens", "tokens", "last", "columns", "history_stride", "tokens_stride", "width"]
)
def match_copies_kernel(
    history, found, rows, seq_lens, tokens, last, columns, history_stride, tokens_stride, width,
    MAX_MATCH: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    row, newest = tl.load(rows + request).to(tl.int64), tl.load(last + request).to(tl.int64)
    text, new = history + row * history_stride, tokens + request * tokens_stride
    first_new = tl.load(seq_lens + request).to(tl.int64) + 1
    first = tl.program_id(1) * TILE
    if (first + TILE > first_new) | (tl.program_id(1) == tl.num_programs(1) - 1):
        # programs cannot synchronise, so each one writes the new tokens it reads
        offsets = tl.arange(0, LANES)
        token = tl.load(new + offsets, mask=offsets < width, other=0).to(tl.int32)
        tl.store(text + first_new + offsets, token, mask=(offsets < width) & (first_new + offsets < columns - 1))
        tl.debug_barrier()  # threads read what others wrote
    lengths = tl.zeros((TILE,), dtype=tl.int32)
    if first < newest:  # the grid covers the longest request
        ends = first + tl.arange(0, TILE)
        alive = ends < newest
        for back in tl.static_range(MAX_MATCH):
            wanted_at = newest - back
            old = tl.load(text + wanted_at, mask=(wanted_at >= 0) & (wanted_at < first_new), other=-1)
            appended = tl.load(new + wanted_at - first_new, mask=wanted_at >= first_new, other=-1).to(tl.int32)
            wanted = tl.where(wanted_at < first_new, old, appended)
            alive = alive & (ends >= back) & (wanted >= 0)
            alive = alive & (tl.load(text + ends - back, mask=alive, other=-1) == wanted)
            lengths += alive.to(tl.int32)
    ends = first + tl.arange(0, TILE)
    keys = tl.where(lengths > 0, (lengths.to(tl.int64) << 31) + ends, 0)
    tl.atomic_max(found + row * 2, (newest << 36) + tl.max(keys, axis=0))


def match_copies(history, found, rows, seq_lens, tokens, last, *, longest, bound):
    assert_histories(history, found)
    assert_dense(rows, seq_lens, last, tokens[:1].flatten())
    bs, width = tokens.shape
    if bs:
        match_copies_kernel[(bs, triton.cdiv(min(bound, history.shape[1] - 1), TILE))](
            history, found, rows, seq_lens, tokens, last, history.shape[1], history.stride(0), tokens.stride(0), width,
            MAX_MATCH=longest, TILE=TILE, LANES=lanes_of(width),
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["tokens", "margins", "rows", "last", "columns", "history_stride", "margins_stride", "width"]
)
def take_copies_kernel(
    tokens, margins, history, found, rows, last, columns, history_stride, margins_stride, width,
    MIN_MATCH: tl.constexpr, MARGIN: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + request).to(tl.int64)
    key = tl.load(found + row * 2)
    length, end = (key >> 31) & 31, key & 0x7FFFFFFF
    period = tl.maximum(tl.load(last + request).to(tl.int64) - end, 1)
    offsets = tl.arange(0, LANES)
    is_draft = offsets < width - 1
    at = tokens + request * width + 1 + offsets
    draft = tl.load(at, mask=is_draft, other=0)
    position = end + 1 + offsets % period
    copied = is_draft & (position < columns) & (length >= MIN_MATCH)
    copy = tl.load(history + row * history_stride + position, mask=copied, other=-1).to(tl.int64)
    copy = tl.where(copy >= 0, copy, draft)
    first = tl.min(tl.where(copy != draft, offsets, LANES), axis=0)
    differs = first < LANES
    margin = tl.load(margins + request * margins_stride + first, mask=differs, other=float("-inf"))
    taken = differs & ((margin >= MARGIN) == 0)  # NaN: nothing was drafted
    tl.store(found + row * 2 + 1, tl.where(taken, first + 1, 0))
    tl.store(at, copy, mask=is_draft & taken)


def take_copies(tokens, margins, history, found, rows, last, *, least, margin):
    assert_histories(history, found)
    assert margins.stride(1) == 1, margins.stride()
    assert_dense(rows, last, tokens.view(-1))
    bs, width = tokens.shape
    if bs:
        take_copies_kernel[(bs,)](
            tokens, margins, history, found, rows, last, history.shape[1], history.stride(0), margins.stride(0), width,
            MIN_MATCH=least, MARGIN=margin, LANES=lanes_of(width), num_warps=1,
        )  # fmt: skip
