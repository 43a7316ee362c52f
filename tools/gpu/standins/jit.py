"""Torch stand-ins for the CUDA kernels that SGLang compiles on first use (``load_jit``)."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def load_jit(*args: str, cuda_wrappers: Any = (), **options: Any) -> SimpleNamespace:
    """Replace SGLang's ``load_jit``: return a module's stand-ins by their exported names.

    Args:
        args: module name, then its C++ template arguments as text.
        cuda_wrappers: (exported name, C++ expression) pairs.
    """
    name, *template = args
    exported = [wrapper[0] for wrapper in cuda_wrappers]
    return SimpleNamespace(**{export: _find(name, export, template) for export in exported})


def _find(module: str, export: str, template: list[str]) -> Callable[..., Any]:
    function = STAND_INS.get((module, export))

    def call(*args: Any) -> Any:
        if function is None:
            raise NotImplementedError(f"{module}.{export}{tuple(template)} has no stand-in: add one to {__file__}")
        return function(template, *args)

    return call


def run_activation(template: list[str], rows: Tensor, out: Tensor, op: str) -> None:
    """Write the activated first half of each row times its second half to ``out``."""
    gate, up = rows.chunk(2, dim=-1)
    activated = {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    }[op](gate.float())
    out.copy_(activated * up.float())


def run_rope(template: list[str], q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
    """Rotate the first ``template[1]`` elements of each head of ``q`` and ``k`` [tokens, heads, head_dim] in place."""
    neox, width = _flag(template[0]), int(template[1])
    cos, sin = cos_sin[positions].float().unsqueeze(1).chunk(2, dim=-1)
    for heads in (q, k):
        turned = heads[..., :width].float()
        first, second = turned.chunk(2, dim=-1) if neox else (turned[..., ::2], turned[..., 1::2])
        rotated = (first * cos - second * sin, second * cos + first * sin)
        heads[..., :width] = torch.cat(rotated, -1) if neox else torch.stack(rotated, -1).flatten(-2)


def run_rope_store(
    template: list[str],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
) -> None:
    """Apply :func:`run_rope`, then store the rotated ``k`` and ``v`` in the caches' rows ``slots``."""
    run_rope(template, q, k, cos_sin, positions)
    for rows, cache in ((k, k_cache), (v, v_cache)):
        cache.view(len(cache), -1)[slots.long()] = rows.reshape(len(rows), -1).to(cache.dtype)


def store_cache(
    template: list[str],
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    limit: int,
    skipped: int,
) -> None:
    """Store ``k`` and ``v`` in the caches' rows ``slots``; the padding slot ``skipped`` may take garbage."""
    for rows, cache in ((k, k_cache), (v, v_cache)):
        cache.view(len(cache), -1)[slots.long()] = rows.reshape(len(rows), -1).to(cache.dtype)


def rmsnorm(template: list[str], rows: Tensor, weight: Tensor, out: Tensor, eps: float) -> None:
    out.copy_(_norm(rows, weight, eps))


def fused_add_rmsnorm(template: list[str], rows: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    """Overwrite ``residual`` with the sum and ``rows`` with the sum's norm."""
    residual.add_(rows)
    rows.copy_(_norm(residual, weight, eps))


def qknorm(template: list[str], q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> None:
    """Normalise each head of ``q`` and ``k`` [tokens, heads, head_dim] in place."""
    q.copy_(_norm(q, q_weight, eps))
    k.copy_(_norm(k, k_weight, eps))


def _norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(rows.float(), weight.shape, weight.float(), eps).to(rows.dtype)


def clamp_position(template: list[str], positions: Tensor, lengths: Tensor) -> None:
    """Write each length's last position, at least 0, to ``positions``."""
    positions.copy_((lengths - 1).clamp(min=0))


def _flag(text: str) -> bool:
    return str(text).lower() in ("true", "1")


# (module, exported name) -> stand-in, which takes the template arguments first.
STAND_INS: dict[tuple[str, str], Callable[..., Any]] = {
    ("activation", "run_activation"): run_activation,
    ("clamp_position", "clamp_position"): clamp_position,
    ("fused_add_rmsnorm", "fused_add_rmsnorm"): fused_add_rmsnorm,
    ("fused_rope", "run_rope"): run_rope,
    ("fused_rope", "run_rope_store"): run_rope_store,
    ("kvcache", "store_cache"): store_cache,
    ("qknorm", "qknorm"): qknorm,
    ("rmsnorm", "rmsnorm"): rmsnorm,
}
