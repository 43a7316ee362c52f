"""Linear layers without quantisation, through :mod:`.dense`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, dtype

from sglang_dflash_cpu.layers.dense import empty_weight, linear


def create_weights(
    original: Callable[..., None],
    self: Any,
    layer: Any,
    input_size_per_partition: int,
    output_partition_sizes: list[int],
    input_size: int,
    output_size: int,
    params_dtype: dtype,
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
