"""Triton kernel of the draft window: a program per request and tile of its ring."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_dflash.ops.kernels import assert_dense

TILE = 1024


@triton.jit(do_not_specialize=["rows", "seq_lens", "positions", "width"])
def view_rings_kernel(
    table, oldest, rows, seq_lens, positions, lengths, slots,
    first, size, window, page, table_stride, width, TILE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    row, committed = tl.load(rows + request).to(tl.int64), tl.load(seq_lens + request).to(tl.int64)
    reach = committed - window
    start = tl.maximum(tl.load(oldest + row), reach - reach % page)
    ring = first + (row - 1) * size
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    slot = ring + (start + column) % size
    tl.store(table + row * table_stride + column, slot.to(tl.int32), mask=column < size)
    if tl.program_id(1) == 0:
        tl.store(lengths + request, committed - start)
        at, in_block = request * width + tl.arange(0, LANES), tl.arange(0, LANES) < width
        tl.store(slots + at, ring + tl.load(positions + at, mask=in_block, other=0) % size, mask=in_block)


def view_rings(
    table: Tensor,
    oldest: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    positions: Tensor,
    *,
    first: int,
    size: int,
    window: int,
    page: int,
) -> tuple[Tensor, Tensor]:
    assert table.stride(1) == 1 and table.shape[1] >= size and len(table) >= len(oldest), table.shape
    assert_dense(oldest, rows, seq_lens, positions)
    lengths, slots, bs = torch.empty_like(rows), torch.empty_like(positions), len(rows)
    width = len(positions) // bs
    view_rings_kernel[(bs, triton.cdiv(size, TILE))](
        *(table, oldest, rows, seq_lens, positions, lengths, slots),
        *(first, size, window, page, table.stride(0), width),
        TILE=TILE,
        LANES=max(32, triton.next_power_of_2(width)),
        num_warps=4,
    )
    return lengths, slots
