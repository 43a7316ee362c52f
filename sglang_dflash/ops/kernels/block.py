"""Triton kernels that lay out, accept and stage a block, and view the rings of a draft window."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dflash.ops.kernels import assert_dense, lanes_of
from sglang_dflash.ops.reference.step import Accepted, Block

TILE = 1024


@triton.jit(do_not_specialize=["bonus", "seq_lens", "req_pool_indices", "width"])
def prepare_block_kernel(
    bonus, seq_lens, req_pool_indices, req_to_token, state_table, tokens, positions, slots, state_slots, columns,
    row_stride, mask_token_id, width, LANES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, LANES)
    in_block = offsets < width
    position = tl.load(seq_lens + row).to(tl.int64) + offsets
    pool_row = tl.load(req_pool_indices + row).to(tl.int64)
    slot = tl.load(req_to_token + pool_row * row_stride + position, mask=in_block & (position < columns), other=0)
    token = tl.where(offsets == 0, tl.load(bonus + row), mask_token_id)
    out = row * width + offsets
    tl.store(tokens + out, token, mask=in_block)
    tl.store(positions + out, position, mask=in_block)
    tl.store(slots + out, slot.to(tl.int64), mask=in_block)
    if state_table is not None:
        tl.store(state_slots + row, tl.load(state_table + pool_row))


def prepare_block(bonus, seq_lens, req_pool_indices, req_to_token, *, width, mask_token_id, state_table=None):
    assert req_to_token.stride(1) == 1, "req_to_token rows must be dense"
    assert_dense(bonus, seq_lens, req_pool_indices, state_table)
    bs = bonus.shape[0]
    tokens = torch.empty((bs, width), dtype=torch.int64, device=bonus.device)
    positions = torch.empty(bs * width, dtype=torch.int64, device=bonus.device)
    slots = torch.empty_like(positions)
    state_slots = None if state_table is None else state_table.new_empty(bs)
    if bs:
        prepare_block_kernel[(bs,)](
            bonus, seq_lens, req_pool_indices, req_to_token, state_table, tokens, positions, slots, state_slots,
            req_to_token.shape[1], req_to_token.stride(0), mask_token_id, width, LANES=lanes_of(width), num_warps=1,
        )  # fmt: skip
    return Block(tokens, positions, slots, state_slots)


@triton.jit(do_not_specialize=["tokens", "drafts", "broken", "margins", "stride", "width", "drafted"])
def take_drafts_kernel(
    tokens, drafts, broken, total, margins, block_margins, stride, width, drafted, LANES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, LANES)
    in_block = offsets < width - 1
    mask_token = tl.load(tokens + row * width + 1)
    draft = tl.load(drafts + row * stride + tl.minimum(offsets, drafted - 1), mask=in_block, other=0)
    tl.debug_barrier()  # another thread may overwrite the mask token
    tl.store(tokens + row * width + 1 + offsets, draft, mask=in_block)
    tl.atomic_add(total, tl.load(broken + row))
    if margins is not None:
        margin = tl.load(margins + row * stride + offsets, mask=offsets < drafted, other=float("-inf"))
        margin = tl.where(draft == mask_token, float("-inf"), margin)
        tl.store(block_margins + row * (width - 1) + offsets, margin, mask=in_block)


def take_drafts(tokens, drafts, broken, total, margins=None):
    assert drafts.stride(1) == 1 and (margins is None or margins.stride() == drafts.stride()), "rows must be dense"
    assert_dense(broken, tokens.view(-1))
    bs, width = tokens.shape
    block_margins = None if margins is None else margins.new_empty(bs, width - 1)
    if bs:
        take_drafts_kernel[(bs,)](
            tokens, drafts, broken, total, margins, block_margins, drafts.stride(0), width, drafts.shape[1],
            LANES=lanes_of(width), num_warps=1,
        )  # fmt: skip
    return block_margins


@triton.jit(
    do_not_specialize=["drafts", "targets", "seq_lens", "count_row", "draft_row", "target_row", "width", "interval"]
)
def accept_block_kernel(
    drafts, targets, seq_lens, counts, ends, bonus, new_seq_lens, count_row, draft_row, target_row, width, interval,
    LANES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, LANES)
    has_draft = offsets < width - 1
    draft = tl.load(drafts + row * draft_row + offsets + 1, mask=has_draft, other=0)
    target = tl.load(targets + row * target_row + offsets, mask=has_draft, other=0)
    # masked lanes are equal
    differs_at = tl.where(draft != target, offsets, width - 1)
    accepted_drafts = tl.min(differs_at, axis=0)
    before = tl.load(seq_lens + row).to(tl.int64)
    after = before + accepted_drafts + 1
    tl.store(counts + row, accepted_drafts + 1)
    tl.store(ends + row, accepted_drafts)
    tl.store(bonus + row, tl.load(targets + row * target_row + accepted_drafts))
    tl.store(new_seq_lens + row, after)
    if interval > 0:
        count = tl.maximum(after // interval * interval - before, 0).to(tl.int32)
        tl.store(counts + count_row + row, count)
        tl.store(ends + count_row + row, count - 1)


def accept_block(draft_tokens, target_tokens, seq_lens, *, interval=0):
    assert draft_tokens.shape == target_tokens.shape, (draft_tokens.shape, target_tokens.shape)
    assert draft_tokens.stride(1) == target_tokens.stride(1) == 1, "rows must be dense"
    assert_dense(seq_lens)
    bs, width = draft_tokens.shape
    # align rows to 16 bytes: later kernels are specialised for that
    shape = 2, 2 if interval else 1, bs + -bs % 4
    counts, ends = torch.empty(shape, dtype=torch.int32, device=draft_tokens.device).unbind()
    bonus = torch.empty(bs, dtype=torch.int64, device=draft_tokens.device)
    new_seq_lens = torch.empty_like(bonus)
    if bs:
        accept_block_kernel[(bs,)](
            draft_tokens, target_tokens, seq_lens, counts, ends, bonus, new_seq_lens,
            counts.stride(0), draft_tokens.stride(0), target_tokens.stride(0), width, interval,
            LANES=lanes_of(width), num_warps=1,
        )  # fmt: skip
    return Accepted(target_tokens, counts[:, :bs], ends[:, :bs], bonus, new_seq_lens)


@triton.jit(do_not_specialize=["positions", "slots", "accept_lens", "staged_positions", "staged_slots", "width"])
def stage_block_kernel(
    hidden, positions, slots, accept_lens, staged_hidden, staged_positions, staged_slots, columns, width,
    TILE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * TILE + tl.arange(0, TILE)
    in_row = offsets < columns
    tl.store(
        staged_hidden + token * columns + offsets, tl.load(hidden + token * columns + offsets, mask=in_row), in_row
    )
    if tl.program_id(1) == 0:
        accepted = token % width < tl.load(accept_lens + token // width)
        tl.store(staged_positions + token, tl.load(positions + token))
        tl.store(staged_slots + token, tl.where(accepted, tl.load(slots + token), 0))


def stage_block(hidden, positions, slots, accept_lens, staged_hidden, staged_positions, staged_slots):
    assert_dense(hidden, positions, slots, accept_lens)
    tokens, columns = hidden.shape
    assert tokens <= min(map(len, (staged_hidden, staged_positions, staged_slots))), f"{tokens} rows do not fit"
    stage_block_kernel[(tokens, triton.cdiv(columns, TILE))](
        hidden, positions, slots, accept_lens, staged_hidden, staged_positions, staged_slots,
        columns, tokens // len(accept_lens), TILE=TILE, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "seq_lens", "positions", "width"])
def view_rings_kernel(
    table, oldest, rows, seq_lens, positions, lengths, slots, first, size, window, page, table_stride, width,
    TILE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    row, committed = tl.load(rows + request).to(tl.int64), tl.load(seq_lens + request).to(tl.int64)
    reach = committed - window
    start = tl.maximum(tl.load(oldest + row), reach - reach % page)
    ring = first + (row - 1) * size
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    slot = ring + (start + column) % size
    tl.store(table + row * table_stride + column, slot.to(tl.int32), mask=column < size)
    if tl.program_id(1) == 0:
        tl.store(lengths + request, committed - start)
        at, in_block = request * width + tl.arange(0, LANES), tl.arange(0, LANES) < width
        tl.store(slots + at, ring + tl.load(positions + at, mask=in_block, other=0) % size, mask=in_block)


def view_rings(table, oldest, rows, seq_lens, positions, *, first, size, window, page):
    assert table.stride(1) == 1 and table.shape[1] >= size and len(table) >= len(oldest), table.shape
    assert_dense(oldest, rows, seq_lens, positions)
    lengths, slots, bs = torch.empty_like(rows), torch.empty_like(positions), len(rows)
    width = len(positions) // bs
    view_rings_kernel[(bs, triton.cdiv(size, TILE))](
        table, oldest, rows, seq_lens, positions, lengths, slots,
        first, size, window, page, table.stride(0), width, TILE=TILE, LANES=lanes_of(width), num_warps=4,
    )  # fmt: skip
    return lengths, slots
