"""GDN decode and verify of the CPU platform against the recurrence, token by token, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sglang_dflash_cpu.layers import gdn
from tests.support.gated_delta import delta_rule, no_host_sync

SLOTS = 9


@dataclass
class Layer:
    """Random inputs of one GDN layer for ``bs`` requests of ``steps`` tokens."""

    bs: int
    steps: int
    H: int = 2
    HV: int = 4
    K: int = 8
    V: int = 6
    dtype: torch.dtype = torch.float32
    state_dtype: torch.dtype = torch.float32
    decay: float = 1.0  # scale of exp(A_log): how fast the state fades
    seed: int = 0

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        tokens = self.bs * self.steps
        self.A_log = torch.log(self.decay * (0.1 + torch.rand(self.HV, generator=generator)))
        self.dt_bias = normal(self.HV)
        self.a = normal(tokens, self.HV).to(self.dtype)
        self.b = normal(tokens, self.HV).to(self.dtype)
        self.qkv = normal(tokens, 2 * self.H * self.K + self.HV * self.V).to(self.dtype)
        self.pool = normal(SLOTS, self.HV, self.V, self.K).to(self.state_dtype)
        self.slots = (1 + torch.randperm(SLOTS - 1, generator=generator)[: self.bs]).to(torch.int32)

    @property
    def g(self) -> Tensor:
        step = torch.nn.functional.softplus(self.a.double() + self.dt_bias.double())
        return -self.A_log.double().exp() * step

    @property
    def beta(self) -> Tensor:
        return self.b.sigmoid().double()  # rounded to its dtype

    def split(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k ``[tokens, H, K]`` and v ``[tokens, HV, V]``, views of the packed projection."""
        q, k, v = self.qkv.split([self.H * self.K, self.H * self.K, self.HV * self.V], -1)
        tokens = len(self.qkv)
        return q.view(tokens, -1, self.K), k.view(tokens, -1, self.K), v.view(tokens, -1, self.V)

    def expected(self, request: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        own = slice(request * self.steps, (request + 1) * self.steps)
        q, k, v = (x[own] for x in self.split())
        state = self.pool[int(self.slots[request])]
        return delta_rule(q, k, v, self.g[own], self.beta[own], state, dtype=dtype)

    def decode(self) -> Tensor:
        out = self.qkv.new_empty(self.bs, 1, self.HV, self.V)
        returned, pool = gdn.decode(
            self.qkv,
            self.a,
            self.b,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            scale=self.K**-0.5,
            initial_state=self.pool,
            out=out,
            ssm_state_indices=self.slots,
            use_qk_l2norm_in_kernel=True,
        )
        assert returned is out and pool is self.pool
        return out

    def verify(self, buffer: Tensor, rows: Tensor) -> Tensor:
        q, k, v = (x.unsqueeze(0) for x in self.split())
        return gdn.verify(
            A_log=self.A_log,
            a=self.a,
            dt_bias=self.dt_bias,
            softplus_beta=1.0,
            softplus_threshold=20.0,
            q=q,
            k=k,
            v=v,
            b=self.b,
            initial_state_source=self.pool,
            initial_state_indices=self.slots,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=torch.arange(0, self.bs * self.steps + 1, self.steps, dtype=torch.int32),
            is_kda=False,
            disable_state_update=True,
            intermediate_states_buffer=buffer,
            intermediate_state_indices=rows,
            cache_steps=self.steps,
            retrieve_parent_token=None,
        )

    def states(self, buffer: Tensor, rows: Tensor, position: int) -> Tensor:
        """Every request's state after one block position, ``[bs, HV, V, K]``."""
        return buffer[rows.long(), position]

    def buffer(self, block: int) -> Tensor:
        """An intermediate buffer with one row more than there are requests, filled with a mark."""
        return torch.full((self.bs + 1, block, self.HV, self.V, self.K), 7.0, dtype=self.state_dtype)


HEADS = pytest.mark.parametrize(("H", "HV"), [(1, 1), (2, 2), (2, 4), (1, 3)])


@HEADS
@pytest.mark.parametrize("bs", [1, 5])
def test_decode_advances_each_requests_state(bs: int, H: int, HV: int) -> None:
    layer = Layer(bs, 1, H, HV)
    expected = [layer.expected(i) for i in range(bs)]
    before = layer.pool.clone()
    out = layer.decode()
    for i, (outputs, states) in enumerate(expected):
        torch.testing.assert_close(out[i].double(), outputs, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(layer.pool[int(layer.slots[i])].double(), states[0], rtol=1e-5, atol=1e-6)
    others = [slot for slot in range(SLOTS) if slot not in layer.slots]
    assert torch.equal(layer.pool[others], before[others])


def test_decode_leaves_every_real_slot_alone_for_padding() -> None:
    layer = Layer(3, 1)
    layer.slots[1] = -1
    before, expected = layer.pool.clone(), layer.expected(2)[0]
    out = layer.decode()
    torch.testing.assert_close(out[2].double(), expected, rtol=1e-5, atol=1e-6)
    untouched = [slot for slot in range(1, SLOTS) if slot not in (int(layer.slots[0]), int(layer.slots[2]))]
    assert torch.equal(layer.pool[untouched], before[untouched])
    assert out.isfinite().all()


@settings(max_examples=40, deadline=None)
@given(
    bs=st.integers(1, 4),
    steps=st.integers(1, 16),
    heads=st.sampled_from([(1, 1), (2, 4), (1, 3)]),
    decay=st.sampled_from([1e-3, 1.0, 30.0]),
    spare=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_verify_equals_the_recurrence_after_every_token(
    bs: int, steps: int, heads: tuple[int, int], decay: float, spare: int, seed: int
) -> None:
    layer = Layer(bs, steps, *heads, decay=decay, seed=seed)
    buffer = layer.buffer(steps + spare)
    rows = torch.randperm(bs + 1, generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    pool = layer.pool.clone()
    out = layer.verify(buffer, rows)
    assert out.shape == (1, bs * steps, layer.HV, layer.V)
    for i in range(bs):
        outputs, states = layer.expected(i)
        own = out[0, i * steps : (i + 1) * steps]
        torch.testing.assert_close(own.double(), outputs, rtol=1e-4, atol=1e-5)
        for t in range(steps):
            kept = layer.states(buffer, rows[:bs], t)[i]
            torch.testing.assert_close(kept.double(), states[t], rtol=1e-4, atol=1e-5)
    assert torch.equal(layer.pool, pool), "a verify must not advance the committed state"
    assert (buffer[rows[bs]] == 7).all()


def test_verify_of_bf16_inputs_stores_each_state_rounded_once() -> None:
    layer = Layer(2, 8, dtype=torch.bfloat16, state_dtype=torch.bfloat16)
    buffer = layer.buffer(8)
    out = layer.verify(buffer, torch.arange(2))
    assert out.dtype == torch.bfloat16
    for i in range(2):
        outputs, states = layer.expected(i)
        torch.testing.assert_close(out[0, i * 8 : i * 8 + 8], outputs.bfloat16(), rtol=2**-7, atol=1e-5)
        torch.testing.assert_close(
            layer.states(buffer, torch.arange(2), 7)[i], states[7].bfloat16(), rtol=2**-7, atol=1e-5
        )


def test_a_block_shorter_than_the_last_one_forgets_what_lies_after_it() -> None:
    layer = Layer(2, 5)
    buffer = layer.buffer(8)
    layer.verify(buffer, torch.arange(2))
    expected = layer.states(buffer, torch.arange(2), 2)
    buffer.fill_(float("nan"))
    layer.verify(buffer, torch.arange(2))
    assert torch.equal(layer.states(buffer, torch.arange(2), 2), expected)


def test_verify_ignores_padding() -> None:
    layer = Layer(3, 4)
    layer.slots[0] = -1
    out = layer.verify(layer.buffer(4), torch.arange(3))
    torch.testing.assert_close(out[0, 4:8].double(), layer.expected(1)[0], rtol=1e-4, atol=1e-5)
    assert out.isfinite().all()


def test_decode_and_verify_never_wait_for_a_value() -> None:
    with no_host_sync():
        Layer(3, 1).decode()
        layer = Layer(2, 4)
        layer.verify(layer.buffer(4), torch.arange(2))


def test_verify_refuses_what_only_other_models_ask_for() -> None:
    layer = Layer(1, 2)
    with pytest.raises(NotImplementedError, match="verify of GDN"):
        gdn.verify(
            layer.A_log,
            layer.a,
            layer.dt_bias,
            1.0,
            20.0,
            *(x.unsqueeze(0) for x in layer.split()),
            b=layer.b,
            initial_state_source=layer.pool,
            initial_state_indices=layer.slots,
        )
