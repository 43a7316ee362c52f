"""Products of the CPU platform, and what it refuses; its other operators are in every server of ``tests/serving``."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_dflash.errors import DFlashError
from sglang_dflash_cpu.layers import dense
from sglang_dflash_cpu.layers.attention_backend import TorchAttentionBackend
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


def test_attention_that_would_be_ignored_is_refused() -> None:
    layer = SimpleNamespace(layer_id=0, logit_cap=30.0, is_cross_attention=False)
    with pytest.raises(DFlashError, match="logit_cap=30"):
        TorchAttentionBackend._refuse_unsupported(layer, {})
