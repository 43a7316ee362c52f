"""Triton kernel of :func:`sglang_dflash.ops.reference.context_keys`: one program per (token, layer)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def context_keys_kernel(
    keys,
    norm_weight,
    positions,
    cos_sin,
    out,
    eps,
    token_stride,
    layer_stride,
    head_stride,
    angle_stride,
    tokens,
    heads,
    head_dim,
    rotary_dim,
    NEOX: tl.constexpr,
    HEADS: tl.constexpr,
    LANES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    lane = tl.arange(0, LANES)[None, :]
    mask = (head < heads) & (lane < head_dim)

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

    source = keys + token * token_stride + layer * layer_stride + head * head_stride
    own = tl.load(source + lane, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(source + partner, mask=mask, other=0.0).to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(own * own, axis=1, keep_dims=True) / head_dim + eps)
    scale = norm_weight + layer * head_dim
    own_scale = tl.load(scale + lane, mask=lane < head_dim, other=0.0).to(tl.float32)
    other_scale = tl.load(scale + partner, mask=lane < head_dim, other=0.0).to(tl.float32)
    own = own * inverse_rms * own_scale
    other = other * inverse_rms * other_scale

    angles = cos_sin + tl.load(positions + token).to(tl.int64) * angle_stride
    cos = tl.load(angles + angle, mask=turns, other=1.0).to(tl.float32)
    sin = tl.load(angles + half + angle, mask=turns, other=0.0).to(tl.float32)
    turned = own * cos + tl.where(leads, -other, other) * sin

    target = out + ((layer * tokens + token) * heads + head) * head_dim
    tl.store(target + lane, turned.to(out.dtype.element_ty), mask=mask)


def context_keys(
    keys: Tensor, norm_weight: Tensor, eps: float, positions: Tensor, cos_sin: Tensor, *, neox: bool = True
) -> Tensor:
    assert keys.stride(-1) == cos_sin.stride(-1) == 1, "last dimensions must be dense"
    assert norm_weight.is_contiguous()
    tokens, layers, heads, head_dim = keys.shape
    out = torch.empty((layers, tokens, heads, head_dim), dtype=keys.dtype, device=keys.device)
    if tokens:
        context_keys_kernel[(tokens, layers)](
            keys,
            norm_weight,
            positions,
            cos_sin,
            out,
            eps,
            keys.stride(0),
            keys.stride(1),
            keys.stride(2),
            cos_sin.stride(0),
            tokens,
            heads,
            head_dim,
            cos_sin.shape[1],
            NEOX=neox,
            HEADS=triton.next_power_of_2(heads),
            LANES=triton.next_power_of_2(head_dim),
            num_warps=4,
        )
    return out
