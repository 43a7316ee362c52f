"""Triton kernel of :func:`sglang_dflash.ops.reference.note_tokens`: one program per request."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sglang_dflash.ops.kernels import assert_dense, assert_histories


@triton.jit(do_not_specialize=["rows", "seq_lens", "tokens", "columns", "history_stride", "tokens_stride", "width"])
def note_tokens_kernel(
    history, found, rows, seq_lens, tokens, columns, history_stride, tokens_stride, width, LANES: tl.constexpr
):
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + request).to(tl.int64)
    offsets = tl.arange(0, LANES)
    in_block = offsets < width
    token = tl.load(tokens + request * tokens_stride + offsets, mask=in_block, other=0)
    position = tl.load(seq_lens + request).to(tl.int64) + 1 + offsets
    tl.store(history + row * history_stride + position, token.to(tl.int32), mask=in_block & (position < columns - 1))
    tl.store(found + row * 2, tl.zeros((), dtype=tl.int64))


def note_tokens(history: Tensor, found: Tensor, rows: Tensor, seq_lens: Tensor, tokens: Tensor) -> None:
    assert_histories(history, found)
    assert_dense(rows, seq_lens, tokens[:1].flatten())
    bs, width = tokens.shape
    if bs:
        note_tokens_kernel[(bs,)](
            history,
            found,
            rows,
            seq_lens,
            tokens,
            history.shape[1],
            history.stride(0),
            tokens.stride(0),
            width,
            LANES=max(32, triton.next_power_of_2(width)),
            num_warps=1,
        )
