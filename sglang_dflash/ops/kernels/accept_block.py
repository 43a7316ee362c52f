"""Triton kernel of :func:`sglang_dflash.ops.reference.accept_block`: one program per request."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_dflash.ops.kernels import assert_dense
from sglang_dflash.ops.reference import Accepted


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
