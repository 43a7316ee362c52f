"""The recurrent layers' scratch, laid out for narrower blocks."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from sglang_dflash.states.pool import packed


@dataclass(frozen=True)
class Cache:
    temporal: Tensor
    intermediate_ssm: Tensor


def cache(layers: int = 2, rows: int = 5, block: int = 16) -> Cache:
    return Cache(torch.zeros(layers, 9, 3, 2), torch.zeros(layers, rows, block, 3, 2))


@pytest.mark.parametrize("width", [1, 2, 3, 5, 8, 16])
def test_every_request_has_its_positions_side_by_side(width: int) -> None:
    scratch = packed(cache(), width).intermediate_ssm
    assert scratch.is_contiguous()  # the commit's kernel insists
    assert scratch.shape[0] == 2 and scratch.shape[1] >= 5 and scratch.shape[2:] == (width, 3, 2)


def test_it_is_the_same_memory() -> None:
    whole = cache()
    narrow = packed(whole, 4)
    narrow.intermediate_ssm[0, 1, 2] = 7  # what a verify of 4 positions writes to after the first request's 4
    assert (whole.intermediate_ssm.flatten(0, 2)[4 + 2] == 7).all() and whole.intermediate_ssm.sum() == 6 * 7
    assert narrow.temporal is whole.temporal
