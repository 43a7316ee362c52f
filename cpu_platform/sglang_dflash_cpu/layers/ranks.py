"""Exchange between ranks and between disaggregated servers, without CUDA events and pinned memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def all_gather_into_tensor(self: Any, output: Tensor, input: Tensor) -> None:
    """Gather every rank's ``input`` into ``output`` over the ``GroupCoordinator`` ``self``."""
    self._all_gather_into_tensor(output, input)


def kv_class(original: Callable[..., Any], transfer_backend: Any, class_type: Any) -> Any:
    """Around ``get_kv_class``: a sender is not to copy slot numbers to pinned memory, behind a CUDA event."""
    found = original(transfer_backend, class_type)
    if found is not None:
        found.supports_host_tensor_indices = False
    return found


def send_prefix_with_the_rest(self: Any, req: Any, allow_send: bool = True) -> None:
    """A cached prefix is not sent before its prefill: SGLang would guard it with a CUDA event."""
