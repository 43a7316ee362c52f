"""Norms and gates: RMS norms of SGLang's layers and of a GDN layer's output; sigmoid gates of attention and experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_dflash.ops.reference import inverse_rms

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swish": F.silu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
}


Normed = Tensor | tuple[Tensor, Tensor]


def _is_plain(x: Tensor, residual: Tensor | None, others: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Whether all is float32 (nothing to round between steps) and the call asks for no more than to add a residual."""
    float32 = x.dtype == torch.float32 and (residual is None or residual.dtype == torch.float32)
    return float32 and not others and all(value is None for value in options.values())


def rms_norm(
    original: Callable[..., Normed], self: Any, x: Tensor, residual: Tensor | None = None, *others: Any, **options: Any
) -> Normed:
    """``RMSNorm.forward_native``: the norm of ``x + residual``, and that sum if there is a residual."""
    if not _is_plain(x, residual, others, options) or self.variance_size_override is not None:
        return original(self, x, residual, *others, **options)
    total = x if residual is None else x + residual
    normed = (total * inverse_rms(total, self.variance_epsilon)).mul_(self.weight)
    return normed if residual is None else (normed, total)


def gemma_rms_norm(
    original: Callable[..., Normed], self: Any, x: Tensor, residual: Tensor | None = None, *others: Any, **options: Any
) -> Normed:
    """``GemmaRMSNorm.forward_native``: the same with ``1 + weight`` as the scale."""
    if not _is_plain(x, residual, others, options):
        return original(self, x, residual, *others, **options)
    total = x if residual is None else x + residual
    normed = total * inverse_rms(total, self.variance_epsilon)
    normed = torch.addcmul(normed, normed, self.weight)
    return normed if residual is None else (normed, total)


def _gated_rms_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float, activation: str) -> Tensor:
    """``rmsnorm(x) * weight * act(gate)`` over the last dimension, in fp32, rounded once to x's dtype."""
    x32 = x.float()
    normed = (x32 * inverse_rms(x32, eps)).mul_(weight)
    return normed.mul_(_ACTIVATIONS[activation](gate.reshape(x.shape).float())).to(x.dtype)


def rms_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Tensor:
    """Qwen3-Next's output norm. ``x`` and ``g``: ``[rows, V]``; ``weight``: ``[V]``."""
    if bias is not None or residual is not None or prenorm:
        raise NotImplementedError("on a CPU, rms_norm_gated has no bias, residual or prenorm")
    return _gated_rms_norm(x, weight, g, eps, activation)


def layernorm_gated(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
    activation: str = "swish",
) -> Tensor:
    """Qwen3.5's output norm. ``x`` and ``z``: ``[rows, V]``; ``weight``: ``[V]``."""
    if z is None or bias is not None or group_size is not None or not (norm_before_gate and is_rms_norm):
        raise NotImplementedError("on a CPU, layernorm_fn is an RMS norm followed by a gate")
    return _gated_rms_norm(x, weight, z, eps, activation)


def sigmoid_mul(attn_output: Tensor, gate: Tensor, inplace: bool = False, quant: bool = False) -> Tensor:
    """``attn_output * sigmoid(gate)`` in fp32, rounded once.

    Args:
        attn_output: ``[tokens, heads * D]``; overwritten if ``inplace``.
        gate: the same elements, ``[tokens, heads * D]`` or a strided ``[tokens, heads, D]``.
        quant: asks for an FP8 result, which this platform does not have.
    """
    if quant:
        raise NotImplementedError("on a CPU, fused_sigmoid_mul has no FP8 output")
    out = attn_output if inplace else torch.empty_like(attn_output)
    return torch.mul(attn_output, gate.reshape(attn_output.shape).float().sigmoid(), out=out)


def add_gated(hidden_states: Tensor, gate_weight: Tensor, shared_output: Tensor, final_hidden_states: Tensor) -> None:
    """Add the shared expert, gated per token, in place: ``final += sigmoid(hidden @ gate_weight) * shared``.

    Args:
        hidden_states: input of the MoE block, ``[tokens, dim]``.
        gate_weight: ``[dim]``.
        shared_output: ``[tokens, dim]``.
        final_hidden_states: output of the routed experts, ``[tokens, dim]``.
    """
    gate = torch.mv(hidden_states.float(), gate_weight.float()).sigmoid_().unsqueeze(-1)
    torch.addcmul(final_hidden_states, gate, shared_output.float(), out=final_hidden_states)
