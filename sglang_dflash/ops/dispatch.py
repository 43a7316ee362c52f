"""Choose how an operation runs: its Triton kernel on CUDA, else its definition in torch."""

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


def by_device(definition: Callable[_P, _R], kernels: str, on_cpu: Callable[_P, _R] | None = None) -> Callable[_P, _R]:
    """Run ``definition``, or the kernel of its name in package ``kernels`` if the first argument is a CUDA tensor.

    Args:
        on_cpu: a faster equal of ``definition``.
    """

    @wraps(definition)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        as_kernel = runs_kernels(cast(torch.Tensor, args[0]))
        chosen: Callable[_P, _R] = _kernel(kernels, definition.__name__) if as_kernel else on_cpu or definition
        return chosen(*args, **kwargs)

    return run
