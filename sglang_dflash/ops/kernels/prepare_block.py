"""Triton kernel of :func:`sglang_dflash.ops.reference.prepare_block`: one program per request."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_dflash.ops.kernels import assert_dense
from sglang_dflash.ops.reference import Block


@triton.jit(do_not_specialize=["bonus", "seq_lens", "req_pool_indices", "width"])
def prepare_block_kernel(
    bonus,
    seq_lens,
    req_pool_indices,
    req_to_token,
    tokens,
    positions,
    slots,
    columns,
    row_stride,
    mask_token_id,
    width,
    LANES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, LANES)
    in_block = offsets < width
    position = tl.load(seq_lens + row).to(tl.int64) + offsets
    table_row = req_to_token + tl.load(req_pool_indices + row).to(tl.int64) * row_stride
    slot = tl.load(table_row + position, mask=in_block & (position < columns), other=0)
    token = tl.where(offsets == 0, tl.load(bonus + row), mask_token_id)
    out = row * width + offsets
    tl.store(tokens + out, token, mask=in_block)
    tl.store(positions + out, position, mask=in_block)
    tl.store(slots + out, slot.to(tl.int64), mask=in_block)


def prepare_block(
    bonus: Tensor,
    seq_lens: Tensor,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    *,
    width: int,
    mask_token_id: int,
) -> Block:
    assert req_to_token.stride(1) == 1, "req_to_token rows must be dense"
    assert_dense(bonus, seq_lens, req_pool_indices)
    bs = bonus.shape[0]
    tokens = torch.empty((bs, width), dtype=torch.int64, device=bonus.device)
    positions = torch.empty(bs * width, dtype=torch.int64, device=bonus.device)
    slots = torch.empty_like(positions)
    if bs:
        prepare_block_kernel[(bs,)](
            bonus,
            seq_lens,
            req_pool_indices,
            req_to_token,
            tokens,
            positions,
            slots,
            req_to_token.shape[1],
            req_to_token.stride(0),
            mask_token_id,
            width,
            LANES=max(32, triton.next_power_of_2(width)),
            num_warps=1,
        )
    return Block(tokens, positions, slots)
