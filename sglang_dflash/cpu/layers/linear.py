"""Linear layers without quantisation, through :mod:`sglang_dflash.ops.linear`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from sglang_dflash.ops.linear import empty_weight, linear


def create_weights(original: Callable[..., None], self: Any, layer: Any, *sizes: Any, **attributes: Any) -> None:
    """``UnquantizedLinearMethod.create_weights``, with the weight stored for this processor.

    Done before any weight is loaded: whoever lays several weights out in one tensor finds the order of their numbers
    as it will be.
    """
    original(self, layer, *sizes, **attributes)
    outputs, inputs = layer.weight.shape
    layer.weight.data = empty_weight(outputs, inputs, layer.weight.dtype)


def apply(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """``UnquantizedLinearMethod.apply``: the product of ``x`` and the weight of ``layer``."""
    return linear(x, layer.weight, bias)
