"""Triton kernel of :func:`sglang_dflash.ops.reference.penalize_block`: one pass over the logits, in place."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sglang_dflash.ops.kernels import assert_dense


@triton.jit(do_not_specialize=["draft_tokens", "rows", "width", "draft_stride"])
def penalize_block_kernel(
    logits,
    draft_tokens,
    counts,
    rows,
    coefficients,
    vocab,
    width,
    logits_stride,
    draft_stride,
    LANES: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64) // width
    position = tl.program_id(0) % width
    row = tl.load(rows + request).to(tl.int64)
    token = tl.program_id(1) * LANES + tl.arange(0, LANES)
    mask = token < vocab

    n = tl.load(counts + row * vocab + token, mask=mask, other=0)
    for j in range(1, position + 1):
        n += (token == tl.load(draft_tokens + request * draft_stride + j)).to(tl.int32)

    value_at = logits + tl.program_id(0).to(tl.int64) * logits_stride + token
    value = tl.load(value_at, mask=mask, other=0.0)
    frequency = tl.load(coefficients + row * 3)
    presence = tl.load(coefficients + row * 3 + 1)
    repetition = tl.load(coefficients + row * 3 + 2)
    generated = n > 0
    value = value - frequency * n - tl.where(generated, presence, 0.0)
    scale = tl.where(generated, repetition, 1.0)
    tl.store(value_at, tl.where(value < 0, value * scale, value / scale), mask=mask)


def penalize_block(logits: Tensor, draft_tokens: Tensor, counts: Tensor, rows: Tensor, coefficients: Tensor) -> None:
    bs, width, vocab = logits.shape
    # A vocabulary padded for tensor parallelism leaves a gap after each row of logits.
    assert logits.stride(2) == 1 and logits.stride(0) == width * logits.stride(1)
    assert draft_tokens.stride(1) == 1, "rows must be dense"
    assert_dense(counts, rows, coefficients)
    if bs:
        lanes = min(1024, triton.next_power_of_2(vocab))
        penalize_block_kernel[(bs * width, triton.cdiv(vocab, lanes))](
            logits,
            draft_tokens,
            counts,
            rows,
            coefficients,
            vocab,
            width,
            logits.stride(1),
            draft_tokens.stride(0),
            LANES=lanes,
            num_warps=4,
        )
