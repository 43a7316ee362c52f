"""Products of the CPU platform, and what it refuses; its other operators are in every server of ``tests/serving``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_dflash_cpu.layers import dense
from sglang_dflash_cpu.layers.dense import empty_weight, mkl_is_fast

INPUT, OUTPUT = 256, 192


@pytest.fixture(params=["Intel Xeon 2.50GHz", "AMD EPYC 9B14"])
def processor(request: pytest.FixtureRequest) -> Iterator[str]:
    mkl_is_fast.cache_clear()
    with mock.patch.object(torch.cpu, "get_capabilities", return_value={"cpu_name": request.param}):
        yield request.param
    mkl_is_fast.cache_clear()


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def lm_head(x: Tensor, weight: Tensor) -> Tensor:
    return dense.lm_head(lambda processor, part: torch.matmul(part, weight.T), None, x)


LENGTHS = (1024, 1025, 1536, 4096, 8192)


@pytest.mark.parametrize(("product", "inputs"), [(dense.linear, 8), *product((dense.linear, lm_head), LENGTHS)])
def test_a_row_of_a_16_bit_product_does_not_depend_on_the_rows_beside_it(
    product: Callable[[Tensor, Tensor], Tensor], inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In exact mode. oneDNN sums a single row of over 1,024 inputs in another order, and with AMX over 32 rows."""
    monkeypatch.setattr(dense, "_batch_invariant", False)
    dense.enable_batch_invariant_mode()
    x, weight = normal(128, inputs).bfloat16(), normal(256, inputs, seed=1).bfloat16()
    alone = torch.cat([product(row, weight) for row in x.split(1)])
    for rows in (2, 3, 5, 16, 32, 33, 48, 64, 128):
        assert torch.equal(product(x[:rows], weight), alone[:rows]), rows


@pytest.mark.parametrize("rows", [1, 16, 86, 100, 128, 129, 192, 300])
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_product_is_the_products(processor: str, rows: int, with_bias: bool) -> None:
    x, weight, bias = normal(rows, INPUT), normal(OUTPUT, INPUT, seed=1), normal(OUTPUT, seed=2)
    stored = empty_weight(OUTPUT, INPUT, torch.float32).copy_(weight)
    result = dense.linear(x, stored, bias if with_bias else None)
    expected = F.linear(x.double(), weight.double(), bias.double() if with_bias else None)
    assert result.shape == (rows, OUTPUT)
    assert result.is_contiguous()
    torch.testing.assert_close(result, expected.float(), rtol=1e-5, atol=1e-4)
