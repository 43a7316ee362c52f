"""Choose how an operation runs: its Triton kernel on CUDA, else its definition in torch or a platform's equivalent."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar, cast

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")


@cache
def _kernel(package: str, name: str) -> Callable[..., Any]:
    """Import on first use, so that a machine without Triton never needs it."""
    launcher: Callable[..., Any] = getattr(importlib.import_module(f"{package}.{name}"), name)
    return launcher


def runs_kernels(tensor: torch.Tensor) -> bool:
    """Whether operations on it run as Triton kernels."""
    return tensor.is_cuda


_replaced: dict[str, Callable[..., Any]] = {}


def replace_on_host(name: str, function: Callable[..., Any]) -> None:
    """Run ``function``, an equivalent and faster implementation, instead of the definition called ``name``."""
    _replaced[name] = function


def by_device(definition: Callable[_P, _R], kernels: str | None = None) -> Callable[_P, _R]:
    """Run ``definition``, or the kernel of its name in package ``kernels`` if the first argument is a CUDA tensor.

    Args:
        kernels: None if torch's own functions serve every device.
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
    """Rows that a product on a CPU is padded to: oneDNN compiles a kernel per number of rows, which takes longer."""
    return rows + -rows % (16 if rows <= 128 else 64)
