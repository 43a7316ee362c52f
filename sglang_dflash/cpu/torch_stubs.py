"""Two methods of ``torch.Tensor`` that have no meaning without an accelerator, made harmless.

SGLang calls them on fixed paths without asking the platform: ``pin_memory`` when it sends the mask of tracked
recurrent states to the device, ``record_stream`` when a speculative step keeps lengths alive for another
stream. Both raise on a machine without an accelerator. Host memory is what the first promises and what a CPU
tensor already has; the second protects memory from other streams, and there are none.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def install() -> None:
    """Patch ``torch.Tensor`` for this process; called only if the CPU platform is active."""
    Tensor.pin_memory = _pin_memory  # type: ignore[method-assign, assignment]
    Tensor.record_stream = _record_stream  # type: ignore[method-assign, assignment]


def _pin_memory(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return tensor


def _record_stream(tensor: Tensor, stream: Any) -> None:
    return None
