"""Blocks for the replay of a gated delta net: random inputs, pools with gaps, records full of NaN."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_dflash.states import replay
from sglang_dflash.states.reference import Records
from sglang_dflash.states.verify import Rule

RING, SLOTS, ROWS = 16, 12, 8
NAMES = ("d", "k", "g", "rawv", "rawk")  # SGLang's, of the records' parts


@dataclass
class Blocks:
    """``bs`` requests of ``width`` tokens in every layer, and a row of padding behind each if ``padded``."""

    bs: int
    width: int
    layers: int = 2
    H: int = 2
    HV: int = 4
    K: int = 8
    V: int = 6
    dtype: torch.dtype = torch.float32
    state_dtype: torch.dtype = torch.float32
    decay: float = 1.0  # scale of exp(A_log): how fast a state fades
    padded: bool = False
    round_beta: bool = False
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(self.device)

        def order(count: int) -> Tensor:
            return 1 + torch.randperm(count - 1, generator=generator)

        if self.padded:
            self.bs *= 2
        live = torch.arange(self.bs) % (2 if self.padded else 1) == 0
        tokens, sizes = self.bs * self.width, [self.H * self.K, self.H * self.K, self.HV * self.V]
        self.live = [bool(x) for x in live]
        self.A_log = torch.log(self.decay * (0.1 + torch.rand(self.HV, generator=generator))).to(self.device)
        self.dt_bias = normal(self.HV)
        # Parts of one projection, as in a server: their tokens are further apart than they are wide.
        self.qkv = normal(self.layers, tokens, sum(sizes) + 2 * self.HV).to(self.dtype)
        self.qkv[:, (~live).repeat_interleave(self.width)] = torch.nan
        q, k, v, self.a, self.b = self.qkv.split([*sizes, self.HV, self.HV], -1)
        self.q, self.k = (x.unflatten(-1, (self.H, self.K)) for x in (q, k))
        self.v = v.unflatten(-1, (self.HV, self.V))
        # Every second layer and slot of the memory is another pool's.
        pool = normal(2 * self.layers, 2 * SLOTS, self.HV, self.V, self.K).to(self.state_dtype)
        self.states = pool[::2, ::2]
        slots = order(SLOTS)
        self.slots = torch.where(live, slots[: self.bs], -1).int().to(self.device)
        self.track_slots = slots[-self.bs :].to(self.device)
        rows = order(ROWS)[: self.bs]
        self.rows = torch.where(live, rows, rows[:1]).to(self.device)  # padding carries what was there before

        length = RING if self.width <= RING else 2 * RING

        def ring(heads: int, *widths: int, dtype: torch.dtype = self.dtype) -> Tensor:
            memory = torch.full((2 * self.layers, 2 * ROWS, heads, length, *widths), torch.nan, dtype=dtype)
            return memory.to(self.device)[::2, ::2]

        low = self.dtype != torch.float32
        self.records = Records(
            updates=ring(self.HV, self.V),
            keys=ring(self.H, self.K),
            decays=ring(self.HV, dtype=torch.float32),
            updates_low=ring(self.HV, self.V) if low else None,
            keys_low=ring(self.H, self.K) if low else None,
        )

    @property
    def scale(self) -> float:
        return self.K**-0.5

    def make_first_decay_strong(self) -> None:
        """Log-decays of about -30,000, then of -0.003: fp32 has no room for both in one sum."""
        self.A_log.fill_(math.log(300))
        self.dt_bias.fill_(0)
        self.a.fill_(-11.5)
        self.a[:, :: self.width] = 100

    def cache(self) -> SimpleNamespace:
        """States and records as SGLang's pool names them; states of one layer and slot are apart, as there."""
        return SimpleNamespace(
            temporal=self.states, **{f"replayssm_{name}": part for name, part in zip(NAMES, self.records, strict=True)}
        )

    def verify(self, operation: Callable[..., Tensor], records: Records, slots: Tensor | None = None) -> Tensor:
        """Outputs of all layers, ``[layers, N, HV, V]``."""
        slots = self.slots if slots is None else slots
        return torch.stack([
            operation(
                self.q[i], self.k[i], self.v[i], self.a[i], self.b[i], self.A_log, self.dt_bias, self.states[i],
                slots, of_records(records, lambda x, i=i: x[i]), self.rows, width=self.width, scale=self.scale,
                round_beta=self.round_beta,
            )
            for i in range(self.layers)
        ])  # fmt: skip

    def inputs(self, layer: int) -> Any:
        """Of a layer's verify, as a rule receives them."""
        given = (getattr(self, name)[layer] for name in ("q", "k", "v", "a", "b"))
        return *given, self.A_log, self.dt_bias, self.states[layer], self.slots

    def run(self, rule: Rule, layer: int) -> Tensor:
        """Outputs of a layer's verify, ``[N, HV, V]``, as a server runs it."""
        cache = SimpleNamespace()
        for name, part in zip(NAMES, self.records, strict=True):
            setattr(cache, f"replayssm_{name}", None if part is None else part[layer])
        outputs: Tensor = rule(self.inputs(layer), cache, served_block(self.width, self.rows))
        return outputs

    def gates(self, layer: int, own: slice) -> tuple[Tensor, Tensor]:
        """Log-decays and write strengths of some tokens, in float64."""
        a, b, bias = (x.double() for x in (self.a[layer, own], self.b[layer, own], self.dt_bias))
        softplus = torch.logaddexp(a + bias, torch.zeros_like(bias))
        beta = b.sigmoid()
        return -self.A_log.double().exp() * softplus, beta.to(self.dtype).double() if self.round_beta else beta

    def expected(self, layer: int, request: int) -> tuple[Tensor, Tensor]:
        """Token by token in float64: outputs ``[T, HV, V]``, and the states before and after each, ``[T + 1, ...]``."""
        own, repeats = slice(request * self.width, (request + 1) * self.width), self.HV // self.H
        q, k = (normalize(x[layer, own].double()).repeat_interleave(repeats, 1) for x in (self.q, self.k))
        v, (g, beta) = self.v[layer, own].double(), self.gates(layer, own)
        outputs, states = [], [self.states[layer, int(self.slots[request])].double()]
        for t in range(self.width):
            after = states[-1] * g[t].exp()[:, None, None]
            write = (v[t] - (after * k[t][:, None]).sum(-1)) * beta[t][:, None]
            states.append(after + write[:, :, None] * k[t][:, None])
            outputs.append((states[-1] * q[t][:, None]).sum(-1) * self.scale)
        return torch.stack(outputs), torch.stack(states)


def normalize(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def served_block(width: int, rows: Tensor) -> Any:
    """SGLang's batch of a verify, as a rule receives it."""
    return SimpleNamespace(req_pool_indices=rows, spec_info=SimpleNamespace(draft_token_num=width))


def decode_with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve with SGLang's Triton decode, which rounds beta."""
    mamba = SimpleNamespace(linear_attn_backend="triton", linear_attn_decode_backend=None)
    monkeypatch.setattr(replay, "get_exec", lambda: SimpleNamespace(mamba=mamba))


def alike(bs: int, **options: Any) -> Blocks:
    """The worst for the triangular system: keys that are all the same, full write strength, no decay."""
    blocks = Blocks(bs, RING, K=32, V=16, **options)
    blocks.k.copy_(blocks.k[:, :1, :1].expand_as(blocks.k))
    blocks.b.fill_(20)
    blocks.A_log.fill_(-30)
    return blocks


def of_records(records: Records, change: Callable[[Tensor], Any]) -> Records:
    return Records(*(None if part is None else change(part) for part in records))
