"""The convolution of a verify against SGLang's two kernels and against its torch definition: bits, no tolerance.

Not collected by itself: tests/ops/test_triton.py runs it under Triton's interpreter (``TRITON_INTERPRET=1``);
on a device it runs with ``OPS_DEVICE=cuda``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from sglang.kernels.ops.attention import triton_gdn_fused_proj as projections
from sglang.kernels.ops.mamba import causal_conv1d_triton as convolutions
from sglang.kernels.ops.mamba.mamba_state_scatter_triton import fused_conv_window_scatter_with_mask
from torch import Tensor

from sglang_dflash.states import reference
from sglang_dflash.states.convolution import gdn_convolve
from sglang_dflash.states.reference import Convolved
from sglang_dflash.states.replay import windows_by_token
from tests.ops.device import DEVICE

H, K, BLOCK, SLOTS, ROWS = 2, 16, 33, 7, 6
BITS = {2: torch.int16, 4: torch.int32}


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(BITS[x.element_size()])


@dataclass
class Layer:
    """Projections of a GDN layer, its states and windows; the last ``pads`` requests are padding."""

    width: int
    bs: int = 2
    HV: int = 4
    V: int = 16
    pads: int = 0
    gap: int = 0  # between the rows of the projections
    bias: bool = False
    dtype: torch.dtype = torch.bfloat16
    state_dtype: torch.dtype | None = None
    windows: str = "by token"  # as SGLang allocates them on CUDA: "by channel"; in a unified pool: "dense"
    spread: float = 1.0

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        tokens, dim, gated = self.bs * self.width, 2 * H * K + self.HV * self.V, self.HV * self.V
        self.dim, stored = dim, self.state_dtype or self.dtype

        def normal(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.randn(*shape).to(dtype).to(DEVICE)

        self.qkvz = (normal(tokens, dim + gated + self.gap) * self.spread)[:, : dim + gated]
        self.ba = normal(tokens, 2 * self.HV + self.gap)[:, : 2 * self.HV]
        self.states, self.weight = normal(SLOTS, dim, 3, dtype=stored), normal(dim, 4)
        self.added = normal(dim) if self.bias else None
        self.slots = torch.randperm(SLOTS)[: self.bs].int().to(DEVICE)
        self.slots[self.bs - self.pads :] = -1
        self.rows = torch.randperm(ROWS)[: self.bs].int().to(DEVICE)
        self.live = (self.bs - self.pads) * self.width

    def memory(self) -> Tensor:
        """Windows ``[ROWS, BLOCK, dim, 3]`` full of 7."""
        dtype = self.states.dtype
        if self.windows == "dense":
            return torch.full((ROWS, BLOCK, self.dim, 3), 7, dtype=dtype, device=DEVICE)
        columns = torch.full((1, ROWS, self.dim, BLOCK + 2), 7, dtype=dtype, device=DEVICE)
        row, channel = columns.stride()[1:3]
        shared = columns.as_strided((1, ROWS, BLOCK, self.dim, 3), (0, row, 1, channel, 1))
        return (shared if self.windows == "by channel" else windows_by_token(shared))[0]

    def sglangs(self) -> tuple[Convolved, Tensor, Tensor]:
        """Results of SGLang's two kernels, the windows, and the states, which its verify shifts."""
        states, windows = self.states.clone(), self.memory()
        mixed, z, b, a = projections.fused_qkvzba_split_reshape_cat_contiguous(
            self.qkvz, self.ba, H, self.HV, K, self.V
        )
        convolved = convolutions.causal_conv1d_update(
            mixed.view(self.bs, self.width, -1).transpose(1, 2), states, self.weight, self.added, "silu",
            conv_state_indices=self.slots, intermediate_conv_window=windows, intermediate_state_indices=self.rows,
        )  # fmt: skip
        return Convolved(convolved.transpose(1, 2).flatten(0, 1), z, a, b), windows, states

    def ours(self, operation: Any = gdn_convolve, **options: Any) -> tuple[Convolved, Tensor, Tensor]:
        states, windows, (b, a) = self.states.clone(), self.memory(), self.ba.chunk(2, -1)
        inputs = (self.qkvz, a, b, self.weight, self.added, states, self.slots, windows, self.rows)
        return operation(*inputs, width=self.width, **options), windows, states


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(convolutions, "is_arch_support_pdl", lambda: False)
        monkeypatch.setattr(Tensor, "is_cuda", property(lambda tensor: True))  # the commit refuses others


FP16, FP32, BF16 = torch.float16, torch.float32, torch.bfloat16
LAYERS = [
    *(Layer(width, pads=width % 2, gap=8 * (width % 3)) for width in (1, 2, 3, 5, 8, 13, 16, 17, 32)),
    Layer(4, bs=3, HV=6, gap=3, bias=True, pads=1),
    Layer(16, bias=True, dtype=FP16, HV=6),
    Layer(5, dtype=FP32),
    Layer(5, dtype=FP32, state_dtype=BF16, pads=1),
    Layer(16, spread=30.0),
    Layer(18, windows="by channel", pads=1),
    Layer(18, windows="dense", pads=1),
]


# The interpreter does not round bfloat16 to float16 as a GPU does, and does not in SGLang's kernel either.
OTHER_STATES = Layer(5, dtype=FP16, state_dtype=BF16, bias=True)


@pytest.mark.parametrize("layer", [*LAYERS, OTHER_STATES], ids=str)
def test_a_verify_convolves_as_sglangs_kernels(layer: Layer) -> None:
    """Also the states after SGLang's commit of any step; padding has zeros and keeps its windows."""
    (expected, expected_windows, expected_states), (found, windows, states) = layer.sglangs(), layer.ours()
    assert torch.equal(bits(found.mixed[: layer.live]), bits(expected.mixed[: layer.live]))
    assert not found.mixed[layer.live :].any()
    for one, other in zip(found[1:], expected[1:], strict=True):
        assert torch.equal(bits(one), bits(other)) and one.is_contiguous()
    assert torch.equal(bits(windows), bits(expected_windows)) and torch.equal(bits(states), bits(layer.states))
    steps = torch.arange(layer.bs, device=DEVICE) % layer.width
    for pool, recorded in ((states, windows), (expected_states, expected_windows)):
        fused_conv_window_scatter_with_mask(pool[None], recorded[None], layer.slots, steps, layer.rows)
    assert torch.equal(bits(states), bits(expected_states))


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_a_verify_convolves_as_it_is_defined(layer: Layer) -> None:
    (expected, *memory), (found, *other) = layer.ours(reference.gdn_convolve), layer.ours()
    if layer.dtype == FP32:  # two implementations of exp
        torch.testing.assert_close(found.mixed, expected.mixed, rtol=1e-6, atol=1e-7)
        expected = expected._replace(mixed=found.mixed)
    for one, of_definition in zip((*found, *other), (*expected, *memory), strict=True):
        assert torch.equal(bits(one), bits(of_definition))


def test_projections_that_were_split_before() -> None:
    """Qwen3-Next's, whose columns SGLang reorders: no z."""
    layer = Layer(5, pads=1)
    (whole, windows, _) = layer.ours()
    layer.qkvz = layer.qkvz[:, : layer.dim].contiguous()
    for operation in (gdn_convolve, reference.gdn_convolve):
        found, recorded, _ = layer.ours(operation)
        assert torch.equal(bits(found.mixed), bits(whole.mixed)) and torch.equal(bits(recorded), bits(windows))
        assert found.z.shape == (layer.bs * 5, layer.HV, 0) and torch.equal(bits(found.b), bits(whole.b))


def test_no_requests() -> None:
    layer = Layer(4, bs=0)
    assert [len(part) for part in layer.ours()[0]] == [0] * 4
