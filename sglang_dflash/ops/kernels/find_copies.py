"""Triton kernel of :func:`sglang_dflash.ops.reference.find_copies`: one program per request and tile of positions."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sglang_dflash.ops.kernels import assert_dense, assert_histories

TILE = 2048


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
