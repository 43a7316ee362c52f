"""A debugging aid: make everything raise that would have the host wait for the device inside a step.

Reading a value back (``.item()``, ``.tolist()``, ``if tensor:``) or asking for a shape that depends on values
(``nonzero``, a boolean mask as an index) stops the host until the device has caught up, and the overlap scheduler
loses its head start. On a CPU such a call costs nothing, so nothing but this guard would show it there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

SWITCH = "SGLANG_DFLASH_FORBID_SYNC"

_READS = {torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.__bool__, torch.Tensor.__int__}
_SHAPED_BY_VALUES = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::unique_dim"}
_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_"}


class HostSync(RuntimeError):
    """A step would have waited for the device."""


class _RefuseMethods(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS:
            raise HostSync(f"{func.__name__} reads a tensor back to the host inside a step")
        return func(*args, **(kwargs or {}))


class _RefuseOps(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        masked = name in _INDEXING and any(i is not None and i.dtype == torch.bool for i in args[1])
        if masked or name in _SHAPED_BY_VALUES:
            raise HostSync(f"{name} makes the host wait inside a step")
        return func(*args, **(kwargs or {}))


def no_autograd() -> contextlib.AbstractContextManager[None]:
    """How a step runs without autograd: in inference mode, where a small operator costs the host less.

    SGLang's default is ``no_grad``, and so is this one under the guard: inference mode hides from it what composite
    operators are made of.
    """
    return torch.no_grad() if os.environ.get(SWITCH) == "1" else torch.inference_mode()


@contextlib.contextmanager
def _refuse_on_host() -> Iterator[None]:
    with _RefuseMethods(), _RefuseOps():
        yield


@contextlib.contextmanager
def _refuse_on_cuda() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def sync_guard(device: torch.device | str) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """A context for the part of a step that must not wait; it does nothing unless SGLANG_DFLASH_FORBID_SYNC=1."""
    if os.environ.get(SWITCH) != "1":
        return contextlib.nullcontext
    return _refuse_on_cuda if torch.device(device).type == "cuda" else _refuse_on_host
