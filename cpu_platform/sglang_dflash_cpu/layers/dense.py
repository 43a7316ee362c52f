"""Products, norms and sigmoid gates."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_dflash.ops import host_rows
from sglang_dflash.ops.reference.model import inverse_rms

LARGE = 1 << 22  # multiply-adds
SMALL = 1 << 12  # multiply-adds up to which torch does not call oneDNN for 16-bit products
# Rows up to which oneDNN's 16-bit products sum alike; with AMX, 33 rows and more sum in another order.
INVARIANT_ROWS = 32
_HAS_ONEDNN = torch.backends.mkldnn.is_available()
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"swish": F.silu, "silu": F.silu, "sigmoid": torch.sigmoid}

Normed = Tensor | tuple[Tensor, Tensor]
_batch_invariant = False


def enable_batch_invariant_mode(enable_bmm: bool = True) -> None:
    """Under ``--enable-deterministic-inference``: no row of a 16-bit product depends on the number of rows."""
    global _batch_invariant
    _batch_invariant = True


@cache
def mkl_is_fast() -> bool:
    return torch.backends.mkl.is_available() and "Intel" in str(torch.cpu.get_capabilities().get("cpu_name"))


def empty_weight(outputs: int, inputs: int, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised weight ``[outputs, inputs]`` in the fastest memory order for :func:`linear`."""
    if dtype == torch.float32 and mkl_is_fast():
        return torch.empty(inputs, outputs, dtype=dtype).t()
    return torch.empty(outputs, inputs, dtype=dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias``: ``[rows, I]`` (or more leading dimensions) and ``[O, I]`` to ``[rows, O]``.

    Torch sends float32 products to MKL, which is fast on Intel processors only, and all others to oneDNN, whose calls
    start slowly. Small products stay with torch.
    """
    products, rows = x.numel() * weight.shape[0], x.shape[0]
    if x.dtype != torch.float32 and x.dim() == 2 and products:
        if _batch_invariant and rows > INVARIANT_ROWS:
            return torch.cat([linear(part, weight, bias) for part in x.split(INVARIANT_ROWS)])
        # oneDNN, like torch's own kernel for small products, sums one row of over 1,024 inputs in another order than
        # two.
        spare = max(2, SMALL * rows // products + 1) - rows
        return F.linear(F.pad(x, (0, 0, 0, spare)), weight, bias)[:rows] if spare > 0 else F.linear(x, weight, bias)
    large = x.dim() == 2 and x.dtype == torch.float32 and products >= LARGE
    if not (_HAS_ONEDNN and x.is_cpu and large) or mkl_is_fast():
        return F.linear(x, weight, bias)
    spare = host_rows(rows) - rows
    padded = F.pad(x, (0, 0, 0, spare)) if spare else x
    return torch.ops.mkldnn._linear_pointwise(padded, weight, bias, "none", [], "")[:rows]


def create_weights(original: Callable[..., None], self: Any, layer: Any, *args: Any, **kw: Any) -> None:
    """``UnquantizedLinearMethod.create_weights``, with the weight ``[O, I]`` in this processor's memory order."""
    original(self, layer, *args, **kw)
    outputs, inputs = layer.weight.shape
    layer.weight.data = empty_weight(outputs, inputs, layer.weight.dtype)


def apply(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    return linear(x, layer.weight, bias)


def lm_head(original: Callable[..., Tensor], self: Any, hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
    """``LogitsProcessor._compute_lm_head``; in batch-invariant mode 2 to 32 rows at a time, as :func:`linear`."""
    if not _batch_invariant:
        return original(self, hidden_states, *args, **options)
    parts = (F.pad(part, (0, 0, 0, max(0, 2 - len(part)))) for part in hidden_states.split(INVARIANT_ROWS))
    return torch.cat([original(self, part, *args, **options) for part in parts])[: len(hidden_states)]


def rms_norm(
    original: Callable[..., Normed], self: Any, x: Tensor, residual: Tensor | None = None, *others: Any, **options: Any
) -> Normed:
    """``RMSNorm.forward_native``: the norm of ``x + residual``, and that sum if there is a residual."""
    if not _adds_only_float32(x, residual, others, options) or self.variance_size_override is not None:
        return original(self, x, residual, *others, **options)
    return _norm(self, x, residual, lambda normed: normed.mul_(self.weight))


def gemma_rms_norm(
    original: Callable[..., Normed], self: Any, x: Tensor, residual: Tensor | None = None, *others: Any, **options: Any
) -> Normed:
    """``GemmaRMSNorm.forward_native``: the same with scale ``1 + weight``."""
    if not _adds_only_float32(x, residual, others, options):
        return original(self, x, residual, *others, **options)
    return _norm(self, x, residual, lambda normed: torch.addcmul(normed, normed, self.weight))


def _adds_only_float32(x: Tensor, residual: Tensor | None, others: tuple[Any, ...], options: dict[str, Any]) -> bool:
    # float32 needs no rounding between steps; other dtypes and options keep SGLang's steps.
    float32 = x.dtype == torch.float32 and (residual is None or residual.dtype == torch.float32)
    return float32 and not others and all(value is None for value in options.values())


def _norm(self: Any, x: Tensor, residual: Tensor | None, scale: Callable[[Tensor], Tensor]) -> Normed:
    total = x if residual is None else x + residual
    normed = scale(total * inverse_rms(total, self.variance_epsilon))
    return normed if residual is None else (normed, total)


def gemma4_rms_norm(self: Any, x: Tensor) -> Tensor:
    """``Gemma4RMSNorm.forward_native`` with the weight that its kernels apply."""
    x32 = x.float()
    return (x32 * inverse_rms(x32, self.eps) * (self.weight.float() + self.scale_shift)).to(x.dtype)


def softcap(full_logits: Tensor, final_logit_softcapping: float) -> Tensor:
    """Return ``cap * tanh(logits / cap)``, in place."""
    return full_logits.div_(final_logit_softcapping).tanh_().mul_(final_logit_softcapping)


def swiglu(x: Tensor, gemm1_alpha: float, gemm1_limit: float) -> Tensor:
    """Gpt-oss's activation of interleaved gates and values, ``[..., 2 * I]`` to ``[..., I]``."""
    gate, up = x[..., ::2].clamp(max=gemm1_limit), x[..., 1::2].clamp(-gemm1_limit, gemm1_limit)
    return gate * torch.sigmoid(gate * gemm1_alpha) * (up + 1)


def sums_of_squares(x1: Tensor, x2: Tensor) -> Tensor:
    """Return the rows' sums of queries and keys ``[rows, ...]``, fp32 ``[2 * rows]``; ranks add theirs."""
    return torch.cat([part.float().pow(2).sum(-1) for part in (x1, x2)])


def norm_queries_and_keys(
    x1: Tensor, x2: Tensor, w1: Tensor, w2: Tensor, sum_sq: Tensor, tp_world: int = 1, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """MiniMax's RMS norms over the heads of all ranks, from :func:`sums_of_squares`."""
    q, k = (
        (x.float() * (total / x.shape[1] / tp_world + eps).rsqrt() * w.float()).to(x.dtype)
        for x, w, total in zip((x1, x2), (w1, w2), sum_sq.view(2, -1, 1), strict=True)
    )
    return q, k


def _gated_rms_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float, activation: str) -> Tensor:
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
    """Qwen3-Next's output norm, ``rmsnorm(x) * weight * act(g)``: ``x``, ``g`` ``[rows, V]``; ``weight`` ``[V]``."""
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
    """Qwen3.5's output norm, ``rmsnorm(x) * weight * act(z)``: ``x``, ``z`` ``[rows, V]``; ``weight`` ``[V]``."""
    if z is None or bias is not None or group_size is not None or not (norm_before_gate and is_rms_norm):
        raise NotImplementedError("on a CPU, layernorm_fn is an RMS norm followed by a gate")
    return _gated_rms_norm(x, weight, z, eps, activation)


def sigmoid_mul(attn_output: Tensor, gate: Tensor, inplace: bool = False, quant: bool = False) -> Tensor:
    """Return ``attn_output * sigmoid(gate)``, computed in fp32 and rounded once.

    ``attn_output`` is ``[tokens, heads * D]``, ``gate`` the same or a strided ``[tokens, heads, D]``.
    """
    if quant:
        raise NotImplementedError("on a CPU, fused_sigmoid_mul has no FP8 output")
    out = attn_output if inplace else torch.empty_like(attn_output)
    return torch.mul(attn_output, gate.reshape(attn_output.shape).float().sigmoid(), out=out)


def add_gated(hidden_states: Tensor, gate_weight: Tensor, shared_output: Tensor, final_hidden_states: Tensor) -> None:
    """Add the shared expert, gated per token, in place: ``final += sigmoid(hidden @ gate_weight) * shared``."""
    # Row by row: matrix-vector products and one-column sigmoids round by the number of rows.
    gate = (hidden_states.float() * gate_weight.float()).sum(-1, keepdim=True).neg_().exp_().add_(1).reciprocal_()
    torch.addcmul(final_hidden_states, gate, shared_output.float(), out=final_hidden_states)
