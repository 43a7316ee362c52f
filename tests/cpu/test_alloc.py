"""Reads and writes of the slot table against a loop over requests."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dflash_cpu.layers.pools import assign_slots, block_slots, last_slots


def table(rows: int = 6, columns: int = 40) -> Tensor:
    return torch.randperm(rows * columns, dtype=torch.int32).view(rows, columns)


def test_block_slots() -> None:
    req_to_token, rows, start = table(), torch.tensor([4, 0, 5]), torch.tensor([0, 17, 32])
    got = block_slots(
        req_pool_indices=rows,
        req_to_token=req_to_token,
        start_offset=start,
        end_offset=start + 8,
        batch_size=3,
        draft_token_num=8,
        device="cpu",
    )
    want = [req_to_token[r, s : s + 8].long() for r, s in zip(rows.tolist(), start.tolist(), strict=True)]
    assert got.dtype == torch.int64
    assert torch.equal(got, torch.cat(want))


def test_assign_slots_of_different_lengths() -> None:
    got = table()
    want = got.clone()
    rows, start, end = torch.tensor([3, 1, 5, 0]), torch.tensor([2, 0, 7, 11]), torch.tensor([5, 9, 7, 12])
    slots = torch.arange(1000, 1000 + int((end - start).sum()))
    assign_slots(rows, got, start, end, slots, 4)
    first = 0
    for r, s, e in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True):
        want[r, s:e] = slots[first : first + e - s].int()
        first += e - s
    assert torch.equal(got, want)


def test_last_slots() -> None:
    req_to_token = table()
    got = last_slots(req_to_token, torch.tensor([2, 4, 1]), torch.tensor([1, 0, 40]))
    assert got.tolist() == [req_to_token[2, 0].item(), -1, req_to_token[1, 39].item()]
