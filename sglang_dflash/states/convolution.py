"""Triton kernel of a GDN layer's causal convolution, defined in :mod:`sglang_dflash.states.reference`.

One program per (channels, or values of z; tokens; request). A tile's taps are four loads of shifted tiles, three of
them from L1, so no token waits for another. Bits are SGLang's: products are rounded to the dtype of the activations and
summed in fp32 from the oldest tap on.
"""

from __future__ import annotations

from functools import cache
from math import gcd

import torch
import triton
import triton.language as tl

from sglang_dflash.ops.kernels import assert_dense, dependent_launch, fetch
from sglang_dflash.states.reference import Convolved

TAPS = 4
_STEPS, _CHANNELS = 16, 64  # at most; a tile of 128 channels is slower (docs/internals/kernels.md)


@triton.jit(do_not_specialize=["slots", "rows", "width", "x_stride", "a_stride", "b_stride", "fetched"])
def gdn_convolve_kernel(
    x, a, b, weight, bias, states, slots, windows, rows, mixed, z, a_out, b_out, width, x_stride, a_stride, b_stride,
    state_slot, state_channel, state_column, window_row, window_step, window_channel, window_column,
    recurrent, recurrent_slot, fetched, DIM: tl.constexpr, GATED: tl.constexpr, HEADS: tl.constexpr,
    PADDED: tl.constexpr, STEPS: tl.constexpr, CHANNELS: tl.constexpr, UNIT: tl.constexpr, OVERLAP: tl.constexpr,
    SILU: tl.constexpr, LINES: tl.constexpr, PART: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    block = tl.program_id(0)
    request = tl.program_id(2).to(tl.int64)
    step = tl.program_id(1) * STEPS + tl.arange(0, STEPS)[:, None]
    token = request * width + step
    in_block = step < width
    channel = block * CHANNELS + tl.arange(0, CHANNELS)
    if block >= DIM // CHANNELS:
        if PDL:
            tl.extra.cuda.gdc_wait()
        value = channel[None, :] - DIM
        gated = in_block & (value < GATED)
        gates = tl.load(x + token * (x_stride * UNIT) + channel[None, :], mask=gated)
        tl.store(z + token * GATED + value, gates, mask=gated)
        if block == DIM // CHANNELS:
            head = tl.arange(0, PADDED)[None, :]
            mask = in_block & (head < HEADS)
            tl.store(a_out + token * HEADS + head, tl.load(a + token * a_stride + head, mask=mask), mask=mask)
            tl.store(b_out + token * HEADS + head, tl.load(b + token * b_stride + head, mask=mask), mask=mask)
        return

    # before the wait: what no kernel of this forward writes
    slot = tl.load(slots + request).to(tl.int64)
    if LINES > 0 and (request < fetched) and (tl.program_id(1) == 0):  # part of the state that the rule reads next
        line = tl.minimum(block * PART + tl.arange(0, PART), LINES - 1)
        LINE: tl.constexpr = 1024 // recurrent.dtype.element_ty.primitive_bitwidth
        fetch(recurrent + tl.maximum(slot, 0) * recurrent_slot + line * LINE)
    windows += tl.load(rows + request).to(tl.int64) * window_row + channel * window_channel
    state_at = states + tl.maximum(slot, 0) * state_slot + channel * state_channel
    # vectors: a [tokens, channels] tile of them would lay out all tiles along tokens
    oldest, older, old = tl.load(state_at), tl.load(state_at + state_column), tl.load(state_at + 2 * state_column)
    if weight.dtype.element_ty == tl.int64:  # a channel's taps
        words = tl.load(weight + channel)
    acc = tl.zeros((STEPS, CHANNELS), tl.float32)
    if bias is not None:
        acc += tl.load(bias + channel).to(tl.float32)[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
    recorded = in_block & (slot >= 0)
    for tap in tl.static_range(4):
        source = step + (tap - 3)
        own_at = x + (token + (tap - 3)) * (x_stride * UNIT) + channel[None, :]
        own = tl.load(own_at, mask=(source >= 0) & in_block, other=0.0)
        if tap < 3:
            before = tl.where(source == -3, oldest[None, :], tl.where(source == -2, older[None, :], old[None, :]))
            own = tl.where(source < 0, before.to(own.dtype), own)
        if weight.dtype.element_ty == tl.int64:
            taps = ((words >> (16 * tap)) & 0xFFFF).to(tl.uint16).to(own.dtype, bitcast=True)
        else:
            taps = tl.load(weight + channel * 4 + tap)
        acc += own * taps[None, :]
        # overlapping windows share their columns with the next ones
        if tap == 3 or (tap > 0 and not OVERLAP):
            tl.store(windows[None, :] + step * window_step + (tap - 1) * window_column, own, mask=recorded)
    if OVERLAP:
        first = (slot >= 0) & (tl.program_id(1) == 0)
        tl.store(windows, older, mask=first)
        tl.store(windows + window_column, old, mask=first)
    if SILU:
        acc = acc / (1 + tl.exp(-acc))
    tl.store(mixed + token * DIM + channel[None, :], tl.where(slot >= 0, acc, 0.0), mask=in_block)


@cache
def cached_lines(device):
    return torch.cuda.get_device_properties(device).L2_cache_size // 256  # half: activations take the rest


def gdn_convolve(
    x, a, b, weight, bias, states, slots, windows, rows, *, width, silu=True, recurrent=None,
):  # fmt: skip
    (tokens, HV), dim, gated = b.shape, len(weight), x.shape[1] - len(weight)
    assert_dense(weight, slots, rows, x[:1], a[:1], b[:1], None if recurrent is None else recurrent[:1])
    assert tokens == len(x) == len(a) == len(slots) * width and len(rows) >= len(slots) and width <= windows.shape[1]
    assert states.shape[1:] == windows.shape[2:] == (dim, TAPS - 1) and weight.shape[1] == TAPS
    assert weight.dtype == x.dtype
    out = Convolved(
        x.new_empty(tokens, dim), x.new_empty(tokens, HV, gated // HV), a.new_empty(tokens, HV),
        b.new_empty(tokens, HV),
    )  # fmt: skip
    unit, channels = gcd(x.stride(0), 8), gcd(dim, gated, _CHANNELS)  # a load has 16 bytes
    if tokens:
        options = dependent_launch()
        lines = recurrent[0].nbytes // 128 if options["PDL"] and recurrent is not None else 0
        grid = dim // channels + max(1, gated // channels), triton.cdiv(width, _STEPS), len(slots)
        gdn_convolve_kernel[grid](
            x, a, b, weight.view(torch.int64) if x.element_size() == 2 else weight, bias, states, slots, windows, rows,
            *out, width, x.stride(0) // unit, a.stride(0), b.stride(0), *states.stride(), *windows.stride(),
            recurrent, recurrent.stride(0) if lines else 0, cached_lines(x.device) // lines if lines else 0, DIM=dim,
            GATED=gated, HEADS=HV, PADDED=triton.next_power_of_2(HV), STEPS=_STEPS, CHANNELS=channels, UNIT=unit,
            LINES=lines, PART=triton.next_power_of_2(triton.cdiv(lines, dim // channels)),
            OVERLAP=windows.stride(1) == windows.stride(3), SILU=silu, num_warps=4, **options,
        )  # fmt: skip
    return out
