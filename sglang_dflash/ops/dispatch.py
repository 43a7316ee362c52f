"""Choose the implementation of an operation: its Triton kernel on CUDA, else the torch definition or a platform's."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar, cast

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")


@cache
def _kernel(module: str, name: str) -> Callable[..., Any]:
    # Imported at the first call: a machine without Triton never needs it.
    launcher: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return launcher


def runs_kernels(tensor: torch.Tensor) -> bool:
    """Return whether operations on ``tensor`` run as CUDA kernels."""
    return tensor.is_cuda


_replaced: dict[str, Callable[..., Any]] = {}


def replace_on_host(name: str, function: Callable[..., Any]) -> None:
    """Replace the definition ``name`` with ``function``, an equivalent, faster implementation for CPU tensors."""
    _replaced[name] = function


def by_device(definition: Callable[_P, _R], kernels: str | None = None) -> Callable[_P, _R]:
    """Return an operation that runs the kernel if its first argument is a CUDA tensor, else ``definition``.

    Args:
        kernels: the module with a launcher of the definition's name; None if torch's own functions serve every device.
    """

    @wraps(definition)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        chosen: Callable[_P, _R] = definition
        if not runs_kernels(cast(torch.Tensor, args[0])):
            chosen = _replaced.get(definition.__name__, definition)
        elif kernels is not None:
            chosen = _kernel(kernels, definition.__name__)
        return chosen(*args, **kwargs)

    return run


def host_rows(rows: int) -> int:
    """Return the padded rows of a product on a CPU: oneDNN compiles a kernel per number of rows."""
    return rows + -rows % (16 if rows <= 128 else 64)
