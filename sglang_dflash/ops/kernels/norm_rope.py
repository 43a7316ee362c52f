"""Triton kernel of :func:`sglang_dflash.ops.reference.model.norm_rope`: one program per (token, two heads, layer)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_dflash.ops.kernels import assert_dense

# Of 128 values each: eight values a thread of one warp. With all heads in one program the registers spilled.
_HEADS = 2


@triton.jit(do_not_specialize=["positions", "tokens"])
def norm_rope_kernel(
    heads,
    norm_weight,
    positions,
    cos_sin,
    out,
    eps,
    layer_stride,
    token_stride,
    head_stride,
    weight_layer_stride,
    weight_head_stride,
    angle_stride,
    tokens,
    num_heads,
    head_dim,
    rotary_dim,
    NEOX: tl.constexpr,
    HEADS: tl.constexpr,
    LANES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    layer = tl.program_id(2).to(tl.int64)
    lane = tl.arange(0, LANES)[None, :]
    mask = (head < num_heads) & (lane < head_dim)

    # Each lane turns with a partner: the other half (neox) or the other member of its pair.
    half = rotary_dim // 2
    turns = lane < rotary_dim
    if NEOX:
        leads = lane < half
        partner = tl.where(leads, lane + half, lane - half)
        angle = tl.where(leads, lane, lane - half)
    else:
        leads = lane % 2 == 0
        partner = tl.where(leads, lane + 1, lane - 1)
        angle = lane // 2
    partner = tl.where(turns, partner, lane)

    source = heads + token * token_stride + layer * layer_stride + head * head_stride
    own = tl.load(source + lane, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(source + partner, mask=mask, other=0.0).to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(own * own, axis=1, keep_dims=True) / head_dim + eps)
    scale = norm_weight + layer * weight_layer_stride + head * weight_head_stride
    own_scale = tl.load(scale + lane, mask=mask, other=0.0).to(tl.float32)
    other_scale = tl.load(scale + partner, mask=mask, other=0.0).to(tl.float32)
    own = own * inverse_rms * own_scale
    other = other * inverse_rms * other_scale

    angles = cos_sin + tl.load(positions + token).to(tl.int64) * angle_stride
    cos = tl.load(angles + angle, mask=turns, other=1.0).to(tl.float32)
    sin = tl.load(angles + half + angle, mask=turns, other=0.0).to(tl.float32)
    turned = own * cos + tl.where(leads, -other, other) * sin

    target = out + ((layer * tokens + token) * num_heads + head) * head_dim
    tl.store(target + lane, turned.to(out.dtype.element_ty), mask=mask)


def norm_rope(
    heads: Tensor, norm_weight: Tensor, eps: float, positions: Tensor, cos_sin: Tensor, *, neox: bool = True
) -> Tensor:
    assert heads.stride(-1) == norm_weight.stride(-1) == cos_sin.stride(-1) == 1, "last dimensions must be dense"
    assert_dense(positions)
    layers, tokens, num_heads, head_dim = heads.shape
    out = torch.empty((layers, tokens, num_heads, head_dim), dtype=heads.dtype, device=heads.device)
    if tokens:
        tile = min(_HEADS, triton.next_power_of_2(num_heads))
        norm_rope_kernel[(tokens, triton.cdiv(num_heads, tile), layers)](
            *(heads, norm_weight, positions, cos_sin, out, eps),
            *(*heads.stride()[:3], *norm_weight.stride()[:2], cos_sin.stride(0)),
            *(tokens, num_heads, head_dim, cos_sin.shape[1]),
            NEOX=neox,
            HEADS=tile,
            LANES=triton.next_power_of_2(head_dim),
            num_warps=1,
        )
    return out
