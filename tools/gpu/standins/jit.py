"""Stand-ins for the CUDA kernels that SGLang compiles on first use (``load_jit``), in torch and ``sgl_kernel``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

Template = list[str]  # C++ template arguments, as text


def sgl_kernel() -> Any:
    """Return SGLang's compiled library, or its stand-in; neither exists without a device."""
    return import_module("sgl_kernel")


def load_jit(*args: str, cuda_wrappers: Any = (), **options: Any) -> SimpleNamespace:
    """Replace SGLang's ``load_jit``: return a module's stand-ins by their exported names.

    Args:
        args: module name, then its C++ template arguments.
        cuda_wrappers: (exported name, C++ expression) pairs.
    """
    name, *template = args
    names = [wrapper[0] for wrapper in cuda_wrappers]
    return SimpleNamespace(**{each: partial(STAND_INS.get(each, _missing(name, each)), template) for each in names})


def _missing(module: str, export: str) -> Callable[..., Any]:
    def call(template: Template, *args: Any) -> Any:
        raise NotImplementedError(f"{module}.{export}{tuple(template)} has no stand-in. Fix: add one to {__file__}")

    return call


def run_activation(template: Template, rows: Tensor, out: Tensor, op: str) -> None:
    """Write the activated first half of each row times its second half to ``out``."""
    if op != "silu":
        _missing("activation", op)(template)
    sgl_kernel().silu_and_mul(rows, out)


def run_rope(template: Template, q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
    """Rotate the first ``template[1]`` elements of each head of ``q`` and ``k`` [tokens, heads, head_dim] in place."""
    neox, width = template[0].lower() in ("true", "1"), int(template[1])
    cos, sin = cos_sin[positions].float().unsqueeze(1).chunk(2, dim=-1)
    for heads in (q, k):
        turned = heads[..., :width].float()
        first, second = turned.chunk(2, dim=-1) if neox else (turned[..., ::2], turned[..., 1::2])
        rotated = (first * cos - second * sin, second * cos + first * sin)
        heads[..., :width] = torch.cat(rotated, -1) if neox else torch.stack(rotated, -1).flatten(-2)


def run_rope_store(template: Template, q: Tensor, k: Tensor, v: Tensor, *args: Tensor) -> None:
    """Apply :func:`run_rope`, then store the rotated ``k`` and ``v`` in the caches' rows ``slots``."""
    k_cache, v_cache, cos_sin, positions, slots = args
    run_rope(template, q, k, cos_sin, positions)
    store_cache(template, k, v, k_cache, v_cache, slots)


def store_cache(
    template: Template, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, *_: int
) -> None:
    """Store ``k`` and ``v`` in the caches' rows ``slots``; the padding slot may receive any value."""
    for rows, cache in ((k, k_cache), (v, v_cache)):
        cache.view(len(cache), -1)[slots.long()] = rows.reshape(len(rows), -1).to(cache.dtype)


def rmsnorm(template: Template, rows: Tensor, weight: Tensor, out: Tensor, eps: float) -> None:
    sgl_kernel().rmsnorm(rows, weight, eps, out=out)


def fused_add_rmsnorm(template: Template, rows: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    """Overwrite ``residual`` with the sum and ``rows`` with the sum's norm."""
    sgl_kernel().fused_add_rmsnorm(rows, residual, weight, eps)


def qknorm(template: Template, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> None:
    """Normalise each head of ``q`` and ``k`` [tokens, heads, head_dim] in place."""
    for heads, weight in ((q, q_weight), (k, k_weight)):
        heads.copy_(sgl_kernel().rmsnorm(heads.reshape(-1, heads.shape[-1]), weight, eps).view_as(heads))


def clamp_position(template: Template, positions: Tensor, lengths: Tensor) -> None:
    """Write each length's last position, at least 0, to ``positions``."""
    positions.copy_((lengths - 1).clamp(min=0))


# Exported name -> stand-in.
_ALL = run_activation, clamp_position, rmsnorm, fused_add_rmsnorm, qknorm, run_rope, run_rope_store, store_cache
STAND_INS: dict[str, Callable[..., None]] = {function.__name__: function for function in _ALL}
