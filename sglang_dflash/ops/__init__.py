"""The operations of one decode step, and the one place that chooses how they run: a kernel on CUDA, else torch.

:mod:`sglang_dflash.ops.reference` and :mod:`sglang_dflash.ops.gdn_replay` define them. A Triton module is imported on
first use, so a machine without Triton never needs it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar, cast

import torch

from sglang_dflash.ops import gdn_replay, reference
from sglang_dflash.ops.dense import argmax, linear
from sglang_dflash.ops.reference import Accepted, Block, confident_lens, token_hash

__all__ = [
    "Accepted",
    "Block",
    "accept_block",
    "argmax",
    "confident_lens",
    "filter_probs",
    "gdn_commit",
    "gdn_verify",
    "linear",
    "norm_rope",
    "penalize_block",
    "prepare_block",
    "seeded_draw",
    "token_hash",
]

_P = ParamSpec("_P")
_R = TypeVar("_R")


@cache
def _kernel(name: str) -> Callable[..., Any]:
    launcher: Callable[..., Any] = getattr(importlib.import_module(f"{__name__}.kernels.{name}"), name)
    return launcher


def _by_device(definition: Callable[_P, _R]) -> Callable[_P, _R]:
    """``definition`` itself, or its kernel when the first (positional) argument is a CUDA tensor."""

    @wraps(definition)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        on_cuda = cast(torch.Tensor, args[0]).is_cuda
        chosen: Callable[_P, _R] = _kernel(definition.__name__) if on_cuda else definition
        return chosen(*args, **kwargs)

    return run


prepare_block = _by_device(reference.prepare_block)
accept_block = _by_device(reference.accept_block)
norm_rope = _by_device(reference.norm_rope)
penalize_block = _by_device(reference.penalize_block)
filter_probs = _by_device(reference.filter_probs)
seeded_draw = _by_device(reference.seeded_draw)
gdn_verify = _by_device(gdn_replay.gdn_verify)
gdn_commit = _by_device(gdn_replay.gdn_commit)
