"""Gated RMS norms that close a GDN layer: the norm of its output times an activation of ``z``."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "swish": F.silu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
}


def _gated_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, eps: float, activation: str
) -> torch.Tensor:
    """``rmsnorm(x) * weight * act(gate)`` over the last dimension, in fp32, rounded once to x's dtype."""
    x32 = x.float()
    scale = x32.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    normed = (x32 * scale).mul_(weight)
    return normed.mul_(_ACTIVATIONS[activation](gate.reshape(x.shape).float())).to(x.dtype)


def rms_norm_gated(
    x: torch.Tensor,
    g: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str = "swish",
    residual: torch.Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Qwen3-Next's output norm. ``x`` and ``g``: ``[rows, V]``; ``weight``: ``[V]``."""
    if bias is not None or residual is not None or prenorm:
        raise NotImplementedError("on a CPU, rms_norm_gated has no bias, residual or prenorm")
    return _gated_rms_norm(x, weight, g, eps, activation)


def layernorm_gated(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    z: torch.Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
    activation: str = "swish",
) -> torch.Tensor:
    """Qwen3.5's output norm. ``x`` and ``z``: ``[rows, V]``; ``weight``: ``[V]``."""
    if z is None or bias is not None or group_size is not None or not (norm_before_gate and is_rms_norm):
        raise NotImplementedError("on a CPU, layernorm_fn is an RMS norm followed by a gate")
    return _gated_rms_norm(x, weight, z, eps, activation)
