"""A server stops promising exactness if a product depends on the number of rows."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("sglang")

from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

from sglang_dflash.features.exact.rows import is_exact
from tests.support.configs import serving_plan

pytestmark = pytest.mark.sglang

HIDDEN, REQUESTS, WIDTH = 64, 3, 8


def by_row(x: Tensor, weight: Tensor) -> Tensor:
    return (x.double()[:, None] * weight.double()).sum(-1).to(x.dtype)


def of_two_blocks(x: Tensor, weight: Tensor) -> Tensor:
    """Another kernel for a verify of two requests only."""
    return by_row(x, weight) * (1.01 if len(x) == 2 * WIDTH else 1)


def of_three_narrow_blocks(x: Tensor, weight: Tensor) -> Tensor:
    """Another kernel for a verify of three requests at half the block."""
    return by_row(x, weight) * (1.01 if len(x) == 3 * WIDTH // 2 else 1)


class Product(UnquantizedLinearMethod):
    def __init__(self, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.product = product

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.product(x, layer.weight) if bias is None else self.product(x, layer.weight) + bias


def projection(outputs: int, inputs: int, method: UnquantizedLinearMethod, *, bias: bool = False) -> nn.Module:
    layer: Any = nn.Linear(inputs, outputs, bias=bias, dtype=torch.bfloat16)
    layer.quant_method = method
    return layer


class Experts(nn.Module):
    """A block of experts that writes its result to its input."""

    def __init__(self, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.experts, self.product, self.weight = nn.Identity(), product, torch.randn(HIDDEN, HIDDEN).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return x.copy_(self.product(x, self.weight))


class Head(LogitsProcessor):
    def __init__(self, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        nn.Module.__init__(self)
        self.product = product

    def _compute_lm_head(self, hidden: Tensor, lm_head: Any) -> Tensor:  # type: ignore[override]
        return self.product(hidden, lm_head.weight)


class Model(nn.Module):
    """Two layers, experts, a tower of images and an LM head."""

    def __init__(self, projects: Any = by_row, mixes: Any = by_row, heads: Any = by_row) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [projection(96, HIDDEN, Product(projects), bias=True) for _ in range(2)]
        convolution = projection(HIDDEN, 4, Product(by_row))
        convolution.weight.data = convolution.weight[:, None].data  # as SGLang's gated delta net has it
        others = Experts(mixes), projection(HIDDEN, 96, Product(by_row)), convolution
        self.model = nn.ModuleList([*layers, *others])
        self.visual = projection(48, HIDDEN, Product(of_two_blocks))
        self.lm_head, self.processor = projection(128, HIDDEN, Product(by_row)), Head(heads)


@pytest.mark.parametrize(
    ("planted", "widths", "found"),
    [
        ({}, (), None),
        ({"projects": of_two_blocks}, None, "(96, 64)"),
        ({"mixes": of_two_blocks}, None, "('experts', 64)"),
        ({"heads": of_two_blocks}, None, "('LM head', 64)"),
        ({"heads": of_three_narrow_blocks}, None, None),
        ({"heads": of_three_narrow_blocks}, (), "('LM head', 64)"),
    ],
)
def test_a_product_by_the_number_of_rows_is_a_reason_against_exactness(
    planted: Any, widths: tuple[int, ...] | None, found: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    plan, config = serving_plan(block=WIDTH, widths=widths), SimpleNamespace(hidden_size=HIDDEN)
    runner: Any = SimpleNamespace(model=Model(**planted), dtype=torch.bfloat16, device="cpu", model_config=config)
    runner.max_running_requests = REQUESTS
    with caplog.at_level(logging.INFO, "sglang_dflash.features.exact.rows"):
        exact = is_exact(runner, plan.served_widths)
    [record] = caplog.records
    if found is None:
        assert exact is True and "greedy output is bit-identical to plain decoding" in record.message
    else:
        assert exact == f"products depend on the number of rows: {found}"
        assert record.message == f"DFLASH: a verify is not exact, so text may differ at near-ties: {exact}"
