"""A block's attention against its definition in float64, on random inputs; run as ``cases.py`` is.

Other slots of the pool, and partial sums that no part has written, are NaN.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from sglang_dflash import ops
from sglang_dflash.ops.kernels import attention
from sglang_dflash.ops.kernels.attention import Tiling
from tests.ops.device import DEVICE

BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
# Of values of unit variance: float32 sums in another order; bfloat16 rounds weights, and the result once more.
BOUND = {torch.float32: 3e-6, BF16: 2e-2}


@dataclass(frozen=True)
class Case:
    """A batch: tokens before each block, and the shapes of a launch. ``pads`` are rows of a graph beyond the batch."""

    lengths: tuple[int, ...]
    width: int = 4
    group: int = 2
    kv_heads: int = 2
    head_dim: int = 16
    page: int = 1
    dtype: torch.dtype = torch.float32
    stored: torch.dtype | None = None
    pads: int = 0
    ring: int = 0
    cut: int = 0
    parts: int | None = 6
    tiles: Tiling | None = Tiling(16, 16, 4, 2)
    sinks: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def error_of(case: Case, seed: int = 0) -> float:
    torch.manual_seed(seed)
    width, heads, requests = case.width, case.group * case.kv_heads, len(case.lengths)
    total = [length + width for length in case.lengths]
    pages = -(-max(total) // case.page)
    owners = torch.randperm(requests + 2)[:requests] + 1
    order = 1 + torch.randperm(pages * requests).view(requests, pages)
    table = torch.full((requests + 4, max(total) + 5 - case.cut), 2**30, dtype=torch.int32)
    table[0] = 0  # of padded rows
    owned = torch.zeros((1 + pages * requests) * case.page, dtype=torch.bool)
    owned[0] = True
    for i, rows in enumerate(total):
        slots = (order[i, :, None] * case.page + torch.arange(case.page)).flatten().roll(case.ring)[:rows]
        slots = slots[: table.shape[1]]
        table[owners[i], : len(slots)] = slots.int()
        owned[slots] = True
    pool = torch.randn(2, len(owned), case.kv_heads, case.head_dim)
    pool[:, ~owned] = torch.nan
    keys, values = pool.to(case.stored or case.dtype).to(DEVICE)
    # the queries are a part of wider rows
    shape = width * (requests + case.pads), heads + 1, case.head_dim
    q = torch.randn(shape, dtype=case.dtype, device=DEVICE)[:, :heads]
    rows = torch.cat([owners, torch.zeros(case.pads, dtype=torch.int64)]).to(DEVICE)
    lengths = torch.tensor([*case.lengths, *[0] * case.pads], device=DEVICE)
    options = {"scale": case.head_dim**-0.5, **case.options}
    options["sinks"] = torch.randn(heads, device=DEVICE) if case.sinks else None
    seen = q, keys, values, table.to(DEVICE), rows, lengths
    with pytest.MonkeyPatch.context() as patch:
        empty = torch.empty
        patch.setattr(torch, "empty", lambda *shape, **how: empty(*shape, **how).fill_(torch.nan))
        got = attention.block_attention(*seen, tiles=case.tiles, parts=case.parts, **options)
    wide = q.double(), keys.to(torch.float32).double(), values.to(torch.float32).double()
    want = inspect.unwrap(ops.block_attention)(*wide, *seen[3:], **options)
    assert got.is_contiguous() and got.dtype == case.dtype
    return (got.double() - want)[: width * requests].abs().max().item()


SHORT, MIXED = (0, 1, 3), (200, 16, 0, 90)
CASES = {
    "one request of one token": Case((0,), width=1, group=1, kv_heads=1),
    "shorter than a tile": Case(SHORT, width=8, pads=1),
    "many parts": Case(MIXED, parts=24),
    "one part each": Case(MIXED, parts=1),
    "two programs per multiprocessor": Case((700, 5, 300), parts=6, tiles=Tiling(16, 16, 4, 2, 2)),
    "more parts than a step of the reduction": Case((700, 20), parts=40),
    "a long request after short ones": Case((*[0] * 12, 300), parts=4),
    "padded rows": Case(MIXED, pads=3),
    "more requests than lanes of the smallest plan": Case(tuple(7 * i % 50 for i in range(20)), width=2, parts=22),
    "pages of 16": Case(MIXED, page=16),
    "pages of 64": Case(MIXED, page=64, group=4),
    "a ring": Case((60, 33), ring=7, options={"window": 40}),
    "a block past the table": Case((40, 60), cut=7),
    "causal": Case(MIXED, width=8, options={"causal": True}),
    "a window": Case(MIXED, width=8, options={"window": 9}),
    "a causal window": Case(MIXED, width=8, options={"window": 9, "causal": True}),
    "a window of the token itself": Case((30,), options={"window": 0, "causal": True}),
    "a soft cap": Case(MIXED, options={"cap": 2.0}),
    "sinks": Case(MIXED, sinks=True),
    "sinks and one part": Case(MIXED, sinks=True, parts=1, options={"causal": True}),
    "groups of 6, two tiles": Case((90, 20), width=7, group=6),
    "groups of 8, width 32": Case((90, 20), width=32, group=8, kv_heads=1, tiles=Tiling(64, 32, 4, 2)),
    **{
        f"bfloat16, dimension {size}": Case((130, 40), head_dim=size, dtype=BF16, tiles=None, parts=None)
        for size in (64, 128, 256)
    },
    **{
        f"{stored}": Case((40, 66), width=8, dtype=BF16, stored=stored, options={"k_scale": 0.5, "v_scale": 2.0})
        for stored in (E4M3, E5M2)
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_block_attention(name: str) -> None:
    case = CASES[name]
    assert error_of(case) <= BOUND[case.dtype]
