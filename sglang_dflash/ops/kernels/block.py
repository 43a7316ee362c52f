"""Triton kernels that lay out and accept a block: one program per request."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_dflash.ops.kernels import assert_dense
from sglang_dflash.ops.reference import Accepted, Block


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


@triton.jit(do_not_specialize=["draft_tokens", "target_tokens", "seq_lens", "draft_stride", "target_stride", "width"])
def accept_block_kernel(
    draft_tokens,
    target_tokens,
    seq_lens,
    accept_lens,
    bonus,
    new_seq_lens,
    draft_stride,
    target_stride,
    width,
    LANES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, LANES)
    has_draft = offsets < width - 1
    draft = tl.load(draft_tokens + row * draft_stride + offsets + 1, mask=has_draft, other=0)
    target = tl.load(target_tokens + row * target_stride + offsets, mask=has_draft, other=0)
    # The first difference ends the prefix; without one (masked lanes are equal) it is all w - 1 drafts.
    differs_at = tl.where(draft != target, offsets, width - 1)
    accepted_drafts = tl.min(differs_at, axis=0)
    tl.store(accept_lens + row, accepted_drafts + 1)
    tl.store(bonus + row, tl.load(target_tokens + row * target_stride + accepted_drafts))
    tl.store(new_seq_lens + row, tl.load(seq_lens + row).to(tl.int64) + accepted_drafts + 1)


def accept_block(draft_tokens: Tensor, target_tokens: Tensor, seq_lens: Tensor) -> Accepted:
    assert draft_tokens.shape == target_tokens.shape, (draft_tokens.shape, target_tokens.shape)
    assert draft_tokens.stride(1) == target_tokens.stride(1) == 1, "rows must be dense"
    assert_dense(seq_lens)
    bs, width = draft_tokens.shape
    accept_lens = torch.empty(bs, dtype=torch.int32, device=draft_tokens.device)
    bonus = torch.empty(bs, dtype=torch.int64, device=draft_tokens.device)
    new_seq_lens = torch.empty_like(bonus)
    if bs:
        accept_block_kernel[(bs,)](
            draft_tokens,
            target_tokens,
            seq_lens,
            accept_lens,
            bonus,
            new_seq_lens,
            draft_tokens.stride(0),
            target_tokens.stride(0),
            width,
            LANES=max(32, triton.next_power_of_2(width)),
            num_warps=1,
        )
    return Accepted(target_tokens, accept_lens, bonus, new_seq_lens)
