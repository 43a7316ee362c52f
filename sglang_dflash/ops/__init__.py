"""Operations of one decode step: torch definitions (:mod:`.reference`), and their Triton kernels on CUDA."""

import importlib
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar, cast

from torch import Tensor

from sglang_dflash.ops.reference import model, sampling, step
from sglang_dflash.ops.reference.model import Noise as Noise
from sglang_dflash.ops.reference.sampling import token_hash as token_hash
from sglang_dflash.ops.reference.step import Accepted as Accepted
from sglang_dflash.ops.reference.step import Block as Block

_P = ParamSpec("_P")
_R = TypeVar("_R")
_replaced: dict[str, Callable[..., Any]] = {}


def replace_on_host(name: str, function: Callable[..., Any]) -> None:
    """Replace the definition ``name`` with an equivalent, faster implementation for CPU tensors."""
    _replaced[name] = function


def runs_kernels(tensor: Tensor) -> bool:
    return tensor.is_cuda


@cache
def _kernel(module: str, name: str) -> Callable[..., Any]:
    launcher: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return launcher


def by_device(definition: Callable[_P, _R], kernels: str | None = None) -> Callable[_P, _R]:
    """Return an operation that runs the kernel for CUDA tensors, else ``definition``.

    ``kernels`` is the module with a launcher of the same name, or None.
    """

    @wraps(definition)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        chosen: Callable[_P, _R] = definition
        if not runs_kernels(cast(Tensor, args[0])):
            chosen = _replaced.get(definition.__name__, definition)
        elif kernels is not None:
            chosen = _kernel(kernels, definition.__name__)
        return chosen(*args, **kwargs)

    return run


def host_rows(rows: int) -> int:
    """Return the padded rows of a product on a CPU: oneDNN compiles a kernel per number of rows."""
    return rows + -rows % (16 if rows <= 128 else 64)


_KERNELS = "sglang_dflash.ops.kernels"
prepare_block = by_device(step.prepare_block, f"{_KERNELS}.block")
take_drafts = by_device(step.take_drafts, f"{_KERNELS}.block")
accept_block = by_device(step.accept_block, f"{_KERNELS}.block")
stage_block = by_device(step.stage_block, f"{_KERNELS}.block")
match_copies = by_device(step.match_copies, f"{_KERNELS}.copies")
take_copies = by_device(step.take_copies, f"{_KERNELS}.copies")
view_rings = by_device(step.view_rings, f"{_KERNELS}.block")
norm_rope = by_device(model.norm_rope, f"{_KERNELS}.model")
block_attention = by_device(model.block_attention, f"{_KERNELS}.attention")
convolve_block = by_device(model.convolve_block, f"{_KERNELS}.model")
leading_tokens = by_device(model.leading_tokens, f"{_KERNELS}.model")
likeliest_tokens = by_device(model.likeliest_tokens, f"{_KERNELS}.model")
walk_candidates = by_device(model.walk_candidates, f"{_KERNELS}.model")
penalize_block = by_device(sampling.penalize_block, f"{_KERNELS}.sampling")
seeded_tokens = by_device(sampling.seeded_tokens, f"{_KERNELS}.sampling")
linear = by_device(model.linear)
