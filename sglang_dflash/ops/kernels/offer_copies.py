"""Triton kernel of :func:`sglang_dflash.ops.reference.offer_copies`: one program per request."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sglang_dflash.ops.kernels import assert_dense, assert_histories


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
            tokens,
            margins,
            history,
            found,
            rows,
            last,
            history.shape[1],
            history.stride(0),
            margins.stride(0),
            width,
            LEAST=least,
            UNSURE=unsure,
            LANES=max(32, triton.next_power_of_2(width)),
            num_warps=1,
        )
