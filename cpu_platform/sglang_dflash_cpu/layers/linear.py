"""Products with unquantised weights, by the fastest route on this processor."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_dflash.ops import host_rows

LARGE = 1 << 22  # multiply-adds
_HAS_ONEDNN = torch.backends.mkldnn.is_available()


@cache
def mkl_is_fast() -> bool:
    """Whether MKL is made for this processor."""
    return torch.backends.mkl.is_available() and "Intel" in str(torch.cpu.get_capabilities().get("cpu_name"))


def empty_weight(outputs: int, inputs: int, dtype: torch.dtype) -> Tensor:
    """An uninitialised weight ``[outputs, inputs]`` on the CPU, stored so that :func:`linear` is fastest."""
    if dtype == torch.float32 and mkl_is_fast():
        return torch.empty(inputs, outputs, dtype=dtype).t()
    return torch.empty(outputs, inputs, dtype=dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``: ``[rows, I]`` (or more leading dimensions) and ``[O, I]`` to ``[rows, O]``.

    Torch sends float32 products to MKL and all others to oneDNN. On Intel processors MKL is the faster one, most of all
    with weights that are stored input by input. On others MKL is slow, but a call of oneDNN takes longer to start, so
    small products stay with torch.
    """
    large = x.dim() == 2 and x.dtype == torch.float32 and x.numel() * weight.shape[0] >= LARGE
    if not (_HAS_ONEDNN and x.is_cpu and large) or mkl_is_fast():
        return F.linear(x, weight, bias)
    rows = x.shape[0]
    spare = host_rows(rows) - rows
    padded = F.pad(x, (0, 0, 0, spare)) if spare else x
    return torch.ops.mkldnn._linear_pointwise(padded, weight, bias, "none", [], "")[:rows]


def create_weights(
    original: Callable[..., None],
    self: Any,
    layer: Any,
    input_size_per_partition: int,
    output_partition_sizes: list[int],
    input_size: int,
    output_size: int,
    params_dtype: torch.dtype,
    **attributes: Any,
) -> None:
    """``UnquantizedLinearMethod.create_weights``, with the weight ``[O, I]`` stored for this processor.

    No weight is loaded yet, so code that later lays several weights out in one tensor sees their final memory order.
    """
    sizes = (input_size_per_partition, output_partition_sizes, input_size, output_size)
    original(self, layer, *sizes, params_dtype, **attributes)
    layer.weight.data = empty_weight(sum(output_partition_sizes), input_size_per_partition, params_dtype)


def apply(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """``UnquantizedLinearMethod.apply``: the product of ``x`` and the weight of ``layer``."""
    return linear(x, layer.weight, bias)
