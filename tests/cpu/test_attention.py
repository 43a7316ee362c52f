"""The batched attention of the CPU backend against a loop over requests, heads and positions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from sglang_dflash.cpu.layers.attention_math import (
    QUERY_TILE,
    Contexts,
    Keys,
    attend,
    attend_blocks,
    attend_prompt,
    block_keys,
    decode_keys,
    padded_block_keys,
    separate_block_keys,
)
from tests.support.attention import loop_attention, rule

HEADS, KV_HEADS, DIM = 4, 2, 16
SCALE = 1 / math.sqrt(DIM)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3}  # bfloat16: the rounding of the result


@dataclass
class Pool:
    """A paged pool with requests scattered over it; slots of no request hold values that must not be read."""

    req_to_token: Tensor
    rows: Tensor
    lens: Tensor
    k: Tensor
    v: Tensor

    @classmethod
    def random(cls, lens: list[int], page_size: int, dtype: torch.dtype = torch.float32, spare: int = 0) -> Pool:
        generator = torch.Generator().manual_seed(sum(lens) + page_size)
        pages_each = [-(-(length + spare) // page_size) for length in lens]
        total = sum(pages_each) + 3
        order = (torch.randperm(total, generator=generator) + 1).tolist()  # page 0 is padding
        req_to_token = torch.zeros(len(lens) + 4, max(pages_each) * page_size + 8, dtype=torch.int32)
        rows = torch.randperm(len(lens) + 4, generator=generator)[: len(lens)]
        used = torch.zeros((total + 1) * page_size, dtype=torch.bool)
        for row, pages in zip(rows.tolist(), pages_each, strict=True):
            slots = torch.cat([torch.arange(page_size) + order.pop() * page_size for _ in range(pages)])
            req_to_token[row, : slots.shape[0]] = slots.int()
            used[slots] = True
        shape = (used.shape[0], KV_HEADS, DIM)
        k, v = (torch.randn(shape, generator=generator) for _ in range(2))
        k[~used], v[~used] = 1e4, 1e4
        return cls(req_to_token, rows, torch.tensor(lens), k.to(dtype), v.to(dtype))

    def contexts(self, lens: list[int] | None = None) -> Contexts:
        return Contexts(self.req_to_token, self.rows, self.lens if lens is None else torch.tensor(lens))

    def slots(self, request: int, stop: int) -> Tensor:
        return self.req_to_token[self.rows[request], :stop].long()


def assert_close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.double(), want, atol=TOLERANCE[got.dtype], rtol=TOLERANCE[got.dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("window", [None, 0, 5, 100])
@pytest.mark.parametrize("lens", [[1], [23], [1, 40, 17], [9, 9, 9]], ids=str)
def test_decode(lens: list[int], window: int | None, page_size: int, dtype: torch.dtype) -> None:
    pool = Pool.random(lens, page_size, dtype)
    q = torch.randn(len(lens), HEADS, DIM).to(dtype)
    keys = decode_keys(pool.contexts(), window=window)
    got = attend(q, pool.k, pool.v, keys, batch=len(lens), scale=SCALE)
    for i, length in enumerate(lens):
        slots = pool.slots(i, length)
        allowed = [[rule(length - 1, c, causal=True, window=window) for c in range(length)]]
        assert_close(got[i : i + 1], loop_attention(q[i : i + 1], pool.k[slots], pool.v[slots], allowed, SCALE))


def batched(pool: Pool, lens: list[int], block: Tensor, *, causal: bool, window: int | None) -> list[Keys]:
    return [padded_block_keys(pool.contexts(lens), block, causal=causal, window=window)]


def each(pool: Pool, lens: list[int], block: Tensor, *, causal: bool, window: int | None) -> list[Keys]:
    return separate_block_keys(pool.contexts(lens), block, causal=causal, window=window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("causal", [True, False], ids=["verify", "draft_block"])
@pytest.mark.parametrize("window", [None, 0, 5, 100])
@pytest.mark.parametrize("lens", [[1], [23], [1, 40, 17], [9, 9, 9]], ids=str)
@pytest.mark.parametrize("together", [True, False], ids=["batched", "each"])
def test_block(
    lens: list[int], window: int | None, causal: bool, page_size: int, dtype: torch.dtype, together: bool
) -> None:
    width = 4
    pool = Pool.random(lens, page_size, dtype, spare=width)
    q = torch.randn(len(lens) * width, HEADS, DIM).to(dtype)
    block = torch.stack([pool.slots(i, n + width)[n:] for i, n in enumerate(lens)])
    keys = (batched if together else each)(pool, lens, block, causal=causal, window=window)
    got = attend_blocks(q, pool.k, pool.v, keys, batch=len(lens), scale=SCALE).view(len(lens), width, HEADS, DIM)
    for i, length in enumerate(lens):
        slots = pool.slots(i, length + width)
        allowed = [
            [rule(length + t, c, causal=causal, window=window) for c in range(length + width)] for t in range(width)
        ]
        want = loop_attention(q.view(len(lens), width, HEADS, DIM)[i], pool.k[slots], pool.v[slots], allowed, SCALE)
        assert_close(got[i], want)


def test_a_padded_request_of_length_zero_gives_finite_numbers() -> None:
    pool = Pool.random([7, 1], 1)
    keys = decode_keys(pool.contexts([7, 0]), window=None)
    out = attend(torch.randn(2, HEADS, DIM), pool.k, pool.v, keys, batch=2, scale=SCALE)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize(("lens", "builds"), [([9, 9], 1), ([3000, 2], 2)], ids=str)
def test_a_batch_is_padded_only_if_that_pays(lens: list[int], builds: int) -> None:
    pool = Pool.random(lens, 1, spare=16)
    block = torch.stack([pool.slots(i, n + 16)[n:] for i, n in enumerate(lens)])
    assert len(block_keys(pool.contexts(), block, causal=True, window=None)) == builds


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("window", [None, 0, 6, 1000])
@pytest.mark.parametrize("prefix", [0, 1, 33])
def test_prompt(prefix: int, window: int | None, causal: bool) -> None:
    length = 19
    q = torch.randn(length, HEADS, DIM)
    k, v = (torch.randn(prefix + length, KV_HEADS, DIM) for _ in range(2))
    oldest = 0 if window is None else max(0, prefix - window)
    got = attend_prompt(q, k[oldest:], v[oldest:], prefix=prefix, causal=causal, window=window, scale=SCALE)
    allowed = [
        [rule(prefix + t, c, causal=causal, window=window) for c in range(prefix + length)] for t in range(length)
    ]
    assert_close(got, loop_attention(q, k, v, allowed, SCALE))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("window", [None, 40])
def test_a_long_prompt_is_cut_into_tiles(window: int | None, causal: bool) -> None:
    """Longer than two tiles: equal to one attention over the whole mask."""
    prefix, length = 70, 2 * QUERY_TILE + 9
    q = torch.randn(length, HEADS, DIM)
    k, v = (torch.randn(prefix + length, KV_HEADS, DIM) for _ in range(2))
    oldest = 0 if window is None else max(0, prefix - window)
    got = attend_prompt(q, k[oldest:], v[oldest:], prefix=prefix, causal=causal, window=window, scale=SCALE)
    distance = (torch.arange(length) + prefix).unsqueeze(1) - torch.arange(prefix + length)
    allowed = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        allowed &= distance >= 0
    if window is not None:
        allowed &= distance.abs() <= window
    scores = torch.einsum("thd,chd->htc", q, k.repeat_interleave(HEADS // KV_HEADS, 1)) * SCALE
    weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
    want = torch.einsum("htc,chd->thd", weights, v.repeat_interleave(HEADS // KV_HEADS, 1))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
