"""Names for a step's stages in profiler traces."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch.profiler import record_function

_P = ParamSpec("_P")
_R = TypeVar("_R")


def traced(name: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Mark a function's calls as a range called ``name``, while a profiler records: at other times a mark costs as much
    as several small operators.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @wraps(function)
        def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if not torch.autograd._profiler_enabled():
                return function(*args, **kwargs)
            with record_function(name):
                return function(*args, **kwargs)

        return run

    return decorate
