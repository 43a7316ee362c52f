"""Collectives that SGLang registers for accelerators only."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def all_gather_into_tensor(self: Any, output: Tensor, input: Tensor) -> None:
    """Gather every rank's ``input`` into ``output`` over the ``GroupCoordinator`` ``self``."""
    self._all_gather_into_tensor(output, input)
