"""Under deterministic inference a row's result does not depend on the rows next to it: bits, no tolerance."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sglang_dflash_cpu.layers import gdn
from sglang_dflash_cpu.layers.attention_math import Contexts, attend_rows, row_keys
from sglang_dflash_cpu.layers.dense import linear

HEADS, KV_HEADS, DIM, WIDTH = 4, 2, 64, 4
LENGTHS = [5, 60, 62, 127, 300]


@pytest.mark.parametrize("window", [None, 24])
def test_attention_of_a_row(window: int | None) -> None:
    torch.manual_seed(0)
    table = torch.randperm(5 * 400).int().view(5, 400)
    k, v = (torch.randn(table.numel(), KV_HEADS, DIM).bfloat16() for _ in "kv")
    rows = torch.arange(5).repeat_interleave(WIDTH)
    lens = (torch.tensor(LENGTHS)[:, None] + torch.arange(1, WIDTH + 1)).flatten()
    q = torch.randn(len(rows), HEADS, DIM).bfloat16()

    def attend(of: Tensor) -> Tensor:
        return attend_rows(q[of], k, v, row_keys(Contexts(table, rows[of], lens[of]), window=window), scale=DIM**-0.5)

    everything = attend(torch.arange(len(rows)))
    each = torch.cat([attend(torch.tensor([row])) for row in range(len(rows))])
    steps = torch.stack([attend(torch.arange(step, len(rows), WIDTH)) for step in range(WIDTH)], 1).flatten(0, 1)
    assert torch.equal(everything, each) and torch.equal(everything, steps)
    for row in (0, 7, 19):  # and it is attention
        reach = slice(max(0, int(lens[row]) - (window + 1)) if window else 0, int(lens[row]))
        slots = table[rows[row], reach].long()
        keys, values = (x[slots].float().repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
        weights = (torch.einsum("hd,chd->hc", q[row].float(), keys) * DIM**-0.5).softmax(-1)
        torch.testing.assert_close(
            everything[row].float(), torch.einsum("hc,chd->hd", weights, values), atol=0.02, rtol=0
        )


WEIGHT = torch.randn(8, 192, generator=torch.Generator().manual_seed(0)).bfloat16()


def small_products(x: Tensor) -> Tensor:
    return linear(x.bfloat16(), WEIGHT)


def gates(x: Tensor) -> Tensor:
    a, b = x[:, :4].bfloat16(), x[:, 4:8].bfloat16()
    return torch.cat(gdn._gates(torch.rand(4).fill_(0.5).log(), a, b, torch.ones(4)), 1)


@pytest.mark.parametrize("operation", [small_products, gates])
def test_an_operation_of_a_row(operation: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    for _ in range(300):
        x = 3 * torch.randn(64, 192)
        for rows in (1, 3, 5):
            assert torch.equal(operation(x), torch.cat([operation(part) for part in x.split(rows)]))
