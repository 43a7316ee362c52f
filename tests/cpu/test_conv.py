"""Causal convolution of the CPU platform (prefill, verify) against a loop over tokens in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from sglang_dflash_cpu.layers import conv
from tests.support.gated_delta import causal_conv

SLOTS, DIM = 9, 10


class Case:
    """Random weights, a pool of states, and distinct slots for some sequences."""

    def __init__(self, count: int, width: int = 4, bias: bool = False) -> None:
        self.generator = torch.Generator().manual_seed(count + width)
        self.weight, self.bias = self.normal(DIM, width), self.normal(DIM) if bias else None
        self.pool = self.normal(SLOTS, DIM, width - 1)
        self.slots = (1 + torch.randperm(SLOTS - 1, generator=self.generator)[:count]).int()

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def state(self, i: int) -> Tensor:
        return self.pool[int(self.slots[i])].clone()

    def prefill(self, x: Tensor, lengths: list[int], fresh: list[bool]) -> Tensor:
        starts = torch.tensor([0, *lengths]).cumsum(0).int()
        return conv.prefill(
            x.t(), self.weight, self.bias, self.pool, starts, lengths, self.slots, ~torch.tensor(fresh), "silu"
        )

    def update(self, x: Tensor, **verify: Tensor | None) -> Tensor:
        return conv.update(x, self.pool, self.weight, self.bias, "silu", conv_state_indices=self.slots, **verify)


def shared_windows(rows: int, block: int, width: int) -> Tensor:
    """Windows that share memory from step to step, as SGLang allocates them for chains; one layer of two."""
    columns = torch.full((2, rows, DIM, block + width - 2), 7.0)
    return columns.unfold(-1, width - 1, 1).transpose(2, 3)[1]


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 200), min_size=1, max_size=5).filter(any),
    width=st.integers(2, 4),
    bias=st.booleans(),
    fresh=st.lists(st.booleans(), min_size=5, max_size=5),
)
def test_prefill_equals_the_loop(lengths: list[int], width: int, bias: bool, fresh: list[bool]) -> None:
    case = Case(len(lengths), width, bias)
    fresh = fresh[: len(lengths)]
    x = case.normal(sum(lengths), DIM)
    for i, new in enumerate(fresh):
        if new:  # its slot may hold any value
            case.pool[int(case.slots[i])] = float("nan")
    histories = [torch.zeros_like(case.state(i)) if new else case.state(i) for i, new in enumerate(fresh)]
    before = case.pool.clone()
    out = case.prefill(x, lengths, fresh)
    assert out.shape == (DIM, sum(lengths)) and out.t().is_contiguous()
    for i, (own, y) in enumerate(zip(x.split(lengths), out.t().split(lengths), strict=True)):
        if len(own) == 0:
            assert torch.equal(case.state(i), histories[i])
            continue
        outputs, windows = causal_conv(own.t(), case.weight, case.bias, histories[i])
        assert_close(y.t().double(), F.silu(outputs), rtol=1e-5, atol=1e-6)
        assert_close(case.state(i).double(), windows[-1], rtol=0, atol=0)
    others = [slot for slot in range(SLOTS) if slot not in case.slots]
    assert torch.equal(case.pool[others], before[others])


def test_padding_reaches_no_real_slot() -> None:
    case = Case(3)
    case.slots[1] = -1
    before = case.pool.clone()
    case.prefill(case.normal(9, DIM), [3, 3, 3], [False, False, False])
    case.update(case.normal(3, DIM))
    untouched = [slot for slot in range(1, SLOTS) if slot not in case.slots[[0, 2]]]
    assert torch.equal(case.pool[untouched], before[untouched])


@settings(max_examples=40, deadline=None)
@given(bs=st.integers(1, 4), steps=st.integers(1, 16), width=st.integers(2, 4), spare=st.integers(0, 3))
def test_verify_stores_the_window_after_every_token(bs: int, steps: int, width: int, spare: int) -> None:
    case = Case(bs, width)
    buffer = shared_windows(bs + 1, steps + spare, width)
    rows = torch.randperm(bs + 1, generator=case.generator)[:bs].int()
    x, pool = case.normal(bs, steps, DIM), case.pool.clone()
    out = case.update(x.transpose(1, 2), intermediate_conv_window=buffer, intermediate_state_indices=rows)
    assert out.shape == (bs, DIM, steps) and out.transpose(1, 2).is_contiguous()
    assert torch.equal(case.pool, pool), "a verify must not advance the committed state"
    for i in range(bs):
        outputs, windows = causal_conv(x[i].t(), case.weight, None, case.state(i))
        assert_close(out[i].double(), F.silu(outputs), rtol=1e-5, atol=1e-6)
        assert_close(buffer[rows[i], :steps].double(), windows, rtol=0, atol=0)
    unused = next(row for row in range(bs + 1) if row not in rows)
    assert (buffer[unused] == 7).all()
    assert spare == 0 or (buffer[:, -1, :, -1] == 7).all()
