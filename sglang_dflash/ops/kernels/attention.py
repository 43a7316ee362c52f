"""Triton kernels of a block's attention, split over the context (flash-decoding).

Every launch plans its parts from the lengths on the device: each part reads about as many rows, whichever request they
belong to. The rows of a tile are the queries of one key head: ``token * group + head of the group``. A request of one
part is written at once, the parts of others are reduced by a second kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from triton.runtime import driver

from sglang_dflash.ops.kernels import assert_dense, fetch

LOG2E = tl.constexpr(1.4426950408889634)
# tiles of a part; shorter ones get a multiprocessor each, because their partial sums cost as many bytes
_SMALL = tl.constexpr(4)
# Lanes that plan: of one warp, or as many as requests can run, up to 512 unless more do.
_FEW, _REQUESTS = 32, 512
_EARLY = tl.constexpr(64)  # half of the rows that a part fetches to the L2 cache before it waits


@dataclass(frozen=True)
class Tiling:
    """Query rows and context rows of a tile, warps and pipeline stages of a program, programs per multiprocessor."""

    rows: int
    columns: int
    warps: int
    stages: int
    per_sm: int = 1


def tiling(rows: int, head_dim: int, itemsize: int, capability: int, stored: int = 2) -> Tiling:
    """Choose the tiles for ``rows`` queries of a key head, by registers and shared memory.

    Args:
        itemsize, stored: bytes of an element of the queries, and of K and V.
        capability: of the GPU, 90 for sm_90.
    """
    large = capability in (80, 90, 100, 103, 110)  # more than 160 KiB of shared memory
    m = min(max(16, triton.next_power_of_2(rows)), 128 if head_dim <= 128 else 64)
    if itemsize > 2:
        return Tiling(min(m, 64), 16, 4, 2)
    if head_dim <= 128:
        if m == 128:
            return Tiling(m, 64, 8, 6) if large else Tiling(m, 16, 8, 3)
        # 8-bit K/V take twice the instructions per byte, which more warps hide; four programs spill
        return Tiling(m, 32, 4, 6, 3 if stored == 1 and capability == 90 else 2) if large else Tiling(m, 32, 4, 3, 2)
    return Tiling(m, 32, 4, 3, 2 if large else 1) if m <= 32 else Tiling(m, 32, 8, 3)


@triton.jit
def _plan(lengths, bs, width, parts, LEFT: tl.constexpr, PER_SM: tl.constexpr, N: tl.constexpr, BS: tl.constexpr):
    """Return of each request: its length with the block, the rows that the block sees, its parts and rows of each."""
    request = tl.arange(0, BS)
    here = request < bs
    length = tl.load(lengths + request, mask=here, other=0).to(tl.int32) + width
    span = tl.minimum(length, width + LEFT) if LEFT >= 0 else length
    units = tl.where(here, tl.cdiv(span, 16), 0)  # of 16 rows
    total = tl.sum(units)
    once = tl.minimum(tl.cdiv(total, parts // PER_SM + 1), _SMALL * N // 16)
    chunk = tl.maximum(tl.maximum(tl.cdiv(total, parts), once), N // 16)
    counts = tl.maximum((units + chunk // 2) // chunk, tl.minimum(units, 1))
    return length, span, counts, tl.cdiv(units, tl.maximum(counts, 1)) * 16


@triton.jit
def _widened(x, dtype: tl.constexpr):
    if x.dtype == tl.uint8:  # e4m3, whose exponent is 8 smaller than float16's
        bits = x.to(tl.uint16)
        x = ((bits & 0x80) << 8 | (bits & 0x7F) << 7).to(tl.float16, bitcast=True) * 256.0
    if x.dtype.primitive_bitwidth == 8:
        x = x.to(tl.float16)
    if x.dtype == tl.float16 and dtype == tl.bfloat16:  # the direct conversion has a sixteenth of the throughput
        x = x.to(tl.float32)
    return x.to(dtype)


@triton.jit
def _write(
    out, acc, top, total, sinks, request, width, head_tile, row, out_token, out_head, v_scale,
    GROUP: tl.constexpr, TILES: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Write the rows ``row`` of a key head, with a sink in each row's sum."""
    real = row < width * GROUP
    head = head_tile // TILES * GROUP + row % GROUP
    if sinks is not None:
        sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * LOG2E
        new = tl.maximum(top, sink)
        fade = tl.exp2(top - new)
        acc, total = acc * fade[:, None], total * fade + tl.exp2(sink - new)
    at = (request * width + row // GROUP).to(tl.int64) * out_token + head * out_head
    values = (acc * (v_scale / tl.where(real, total, 1.0))[:, None]).to(out.dtype.element_ty)
    tl.store(out + at[:, None] + tl.arange(0, D)[None, :], values, mask=real[:, None])


@triton.jit(do_not_specialize=["lengths", "rows", "bs", "width", "parts"])
def attend_block_kernel(
    q, keys, values, table, rows, lengths, sinks, out, sums, stats, bs, width, parts,
    q_token, q_head, k_slot, k_head, v_slot, v_head, table_row, columns, out_token, out_head, scale, v_scale,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, TILES: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, STAGES: tl.constexpr, PER_SM: tl.constexpr, LEFT: tl.constexpr, CAUSAL: tl.constexpr,
    CAP: tl.constexpr, BS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:  # the reduction plans meanwhile
        tl.extra.cuda.gdc_launch_dependents()
    part, head_tile = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, BS)
    table_rows = tl.load(rows + lane, mask=lane < bs, other=0).to(tl.int32)
    length, span, counts, share = _plan(lengths, bs, width, parts, LEFT, PER_SM, N, BS)
    ends = tl.cumsum(counts, 0)
    before, mine = ends <= part, (ends > part) & (ends - counts <= part)  # sums that do not wait for each other
    request, split = tl.sum(before.to(tl.int32)), part - tl.sum(tl.where(before, counts, 0))
    place = tl.sum(tl.where(before & (counts > 1), counts, 0)) + split
    of_request, length = tl.sum(tl.where(mine, counts, 0)), tl.sum(tl.where(mine, length, 0))
    span, share = tl.sum(tl.where(mine, span, 0)), tl.sum(tl.where(mine, share, 0))
    slots = table + tl.sum(tl.where(mine, table_rows, 0)).to(tl.int64) * table_row
    first = length - span + split * share
    last = tl.minimum(first + share, length)
    if first >= last:
        return
    place = place * (KV_HEADS * TILES) + head_tile  # a few million values in all
    row = head_tile % TILES * M + tl.arange(0, M)
    kv_head, d, n = head_tile // TILES, tl.arange(0, D), tl.arange(0, N)
    keys += kv_head * k_head
    values += kv_head * v_head
    if PDL:  # lengths, rows, the table and the context are older than the kernel before
        LINE: tl.constexpr = 1024 // keys.dtype.element_ty.primitive_bitwidth
        lines = tl.arange(0, (D + LINE - 1) // LINE)[None, :] * LINE
        for start in tl.static_range(0, 2 * _EARLY, _EARLY):
            ahead = first + start + tl.arange(0, _EARLY)
            early = tl.load(slots + ahead, mask=(ahead < last) & (ahead < columns), other=0).to(tl.int64)[:, None]
            fetch(keys + early * k_slot + lines)
            fetch(values + early * v_slot + lines)
        tl.extra.cuda.gdc_wait()
    q_row = (request * width + row // GROUP).to(tl.int64) * q_token + (kv_head * GROUP + row % GROUP) * q_head
    query = tl.load(q + q_row[:, None] + d[None, :], mask=(row < width * GROUP)[:, None], other=0.0)
    position = length - width + row // GROUP
    top, total = tl.full((M,), float("-inf"), tl.float32), tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, D), tl.float32)
    for at in tl.range(first, last, N, num_stages=STAGES):
        column = at + n
        inside = column < last
        # a block may end past the table, in slot 0
        slot = tl.load(slots + column, mask=inside & (column < columns), other=0).to(tl.int64)
        key = tl.load(keys + slot[:, None] * k_slot + d[None, :], mask=inside[:, None], other=0.0)
        score = tl.dot(query, tl.trans(_widened(key, query.dtype)), input_precision="ieee")
        if CAP > 0:
            score = CAP * (1 - 2 / (tl.exp2(score * (scale * 2 * LOG2E / CAP)) + 1)) * LOG2E
        else:
            score *= scale * LOG2E
        seen = inside[None, :]
        if CAUSAL:
            seen &= column[None, :] <= position[:, None]
        if LEFT >= 0:
            seen &= column[None, :] >= position[:, None] - LEFT
        score = tl.where(seen, score, float("-inf"))
        new = tl.maximum(top, tl.max(score, 1))
        base = tl.where(new == float("-inf"), 0.0, new)
        weight, fade = tl.exp2(score - base[:, None]), tl.exp2(top - base)
        value = tl.load(values + slot[:, None] * v_slot + d[None, :], mask=inside[:, None], other=0.0)
        total = total * fade + tl.sum(weight, 1)
        value = _widened(value, query.dtype)
        acc = tl.dot(weight.to(query.dtype), value, acc * fade[:, None], input_precision="ieee")
        top = new
    if of_request == 1:
        _write(
            out, acc, top, total, sinks, request, width, head_tile, row, out_token, out_head, v_scale, GROUP, TILES, D
        )
    else:
        tile_row = tl.arange(0, M)
        tl.store(sums + place * (M * D) + tile_row[:, None] * D + d[None, :], acc)
        tl.store(stats + place * (2 * M) + tile_row, top)
        tl.store(stats + place * (2 * M) + M + tile_row, total)


@triton.jit(do_not_specialize=["lengths", "bs", "width", "parts"])
def reduce_parts_kernel(
    lengths, sinks, out, sums, stats, bs, width, parts, out_token, out_head, v_scale,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, TILES: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, PER_SM: tl.constexpr, LEFT: tl.constexpr, S: tl.constexpr, R: tl.constexpr, BS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    tile_row, head_tile, request = tl.program_id(0) * R + tl.arange(0, R), tl.program_id(1), tl.program_id(2)
    _, span, counts, share = _plan(lengths, bs, width, parts, LEFT, PER_SM, N, BS)
    lane = tl.arange(0, BS)
    of_request, share = tl.sum(tl.where(lane == request, counts, 0)), tl.sum(tl.where(lane == request, share, 0))
    span = tl.sum(tl.where(lane == request, span, 0))
    start = tl.sum(tl.where((lane < request) & (counts > 1), counts, 0))
    if of_request == 1:
        if PDL:  # every program waits, or the next kernel would not come after the parts
            tl.extra.cuda.gdc_wait()
        return
    if PDL:
        tl.extra.cuda.gdc_wait()
    d = tl.arange(0, D)
    top, total = tl.full((R,), float("-inf"), tl.float32), tl.zeros((R,), tl.float32)
    acc = tl.zeros((R, D), tl.float32)
    for at in range(0, of_request, S):
        split = at + tl.arange(0, S)
        there = ((split < of_request) & (split * share < span))[None, :]
        place = (start + split) * (KV_HEADS * TILES) + head_tile
        of_row = stats + place[None, :] * (2 * M) + tile_row[:, None]
        tops = tl.load(of_row, mask=there, other=float("-inf"))
        new = tl.maximum(top, tl.max(tops, 1))
        base = tl.where(new == float("-inf"), 0.0, new)
        mine, fade = tl.exp2(top - base), tl.exp2(tops - base[:, None])
        total = total * mine + tl.sum(tl.load(of_row + M, mask=there, other=0.0) * fade, 1)
        partial = sums + place[None, :, None] * (M * D) + tile_row[:, None, None] * D + d[None, None, :]
        partial = tl.load(partial, mask=there[:, :, None], other=0.0) * fade[:, :, None]
        acc = acc * mine[:, None] + tl.sum(partial, 1)
        top = new
    row = head_tile % TILES * M + tile_row
    _write(out, acc, top, total, sinks, request, width, head_tile, row, out_token, out_head, v_scale, GROUP, TILES, D)


@cache
def _gpu(device):
    """Return the compute capability, 90 for sm_90, and the number of multiprocessors."""
    properties = driver.active.utils.get_device_properties(device)
    return driver.active.get_current_target().arch, properties["multiprocessor_count"]


def block_attention(
    q, keys, values, table, rows, lengths, *, scale, causal=False, window=-1, cap=0.0, sinks=None, k_scale=1.0,
    v_scale=1.0, tiles=None, parts=None,
):  # fmt: skip
    assert table.stride(1) == q.stride(2) == keys.stride(2) == values.stride(2) == 1, "last dimensions must be dense"
    assert_dense(rows, lengths, sinks)
    (tokens, heads, D), kv_heads, bs = q.shape, keys.shape[1], len(rows)
    out = torch.empty((tokens, heads, D), dtype=q.dtype, device=q.device)
    if not bs:
        return out
    # Triton's interpreter has no device
    capability, multiprocessors = _gpu(driver.active.get_current_device()) if q.is_cuda else (0, 4)
    if keys.dtype == torch.float8_e4m3fn and capability < 89:
        keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    width, group = tokens // bs, heads // kv_heads
    chosen = tiles or tiling(width * group, D, q.element_size(), capability, keys.element_size())
    per_head = triton.cdiv(width * group, chosen.rows)
    programs = kv_heads * per_head
    parts = parts or max(1, chosen.per_sm * multiprocessors // programs)
    # of requests with several parts, each of which rounds up by a third at most
    most = triton.cdiv(4 * parts, 3)
    sums = torch.empty(most, programs, chosen.rows, D, dtype=torch.float32, device=q.device)
    stats = torch.empty(most, programs, 2, chosen.rows, dtype=torch.float32, device=q.device)
    lanes = triton.next_power_of_2(max(bs, min(len(table), _REQUESTS))) if bs > _FEW else _FEW
    shape = {
        "GROUP": group, "KV_HEADS": kv_heads, "D": D, "TILES": per_head, "M": chosen.rows, "N": chosen.columns,
        "PER_SM": chosen.per_sm, "LEFT": window, "BS": lanes, "PDL": capability >= 90,
    }  # fmt: skip
    options = {"launch_pdl": True} if capability >= 90 else {}
    attend_block_kernel[parts + bs, programs](
        q, keys, values, table, rows, lengths, sinks, out, sums, stats, bs, width, parts,
        *q.stride()[:2], *keys.stride()[:2], *values.stride()[:2], table.stride(0), table.shape[1], *out.stride()[:2],
        scale * k_scale, v_scale, **shape, STAGES=chosen.stages, CAUSAL=causal, CAP=cap, num_warps=chosen.warps,
        maxnreg=min(255, 2048 // (chosen.warps * chosen.per_sm)), **options,
    )  # fmt: skip
    # one request has all parts; of several, each has a few
    splits, reduced, warps = (32, 4096, 4) if bs == 1 else (4, 2048, 1)
    reduced = max(1, min(chosen.rows, reduced // (splits * D)))
    reduce_parts_kernel[triton.cdiv(min(chosen.rows, width * group), reduced), programs, bs](
        lengths, sinks, out, sums, stats, bs, width, parts, *out.stride()[:2], v_scale,
        **shape, S=splits, R=reduced, num_warps=warps, **options,
    )  # fmt: skip
    return out
