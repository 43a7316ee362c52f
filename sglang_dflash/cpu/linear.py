"""Linear layers without quantisation, through :func:`sglang_dflash.ops.linear`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sglang_dflash.ops import linear


def apply(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """``UnquantizedLinearMethod.apply``: the product of ``x`` and the weight of ``layer``."""
    return linear(x, layer.weight, bias)
