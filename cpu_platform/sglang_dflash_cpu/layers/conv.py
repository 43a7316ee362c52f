"""Depthwise causal convolution over time; a state pool keeps each request's last ``width - 1`` inputs.

Rows ``[..., time, dim]`` are ``width - 1`` rows of history, then the tokens. Output t reads rows ``t .. t + width -
1``; the next state begins at row ``t + 1``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_dflash.states.reference import Convolved
from sglang_dflash_cpu.layers.pools import live_slots


def _activate(y: Tensor, activation: str | bool | None) -> Tensor:
    return F.silu(y, inplace=True) if activation in ("silu", "swish", True) else y


def _filter_one(window: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # One window per request, [bs, width, dim] to [bs, 1, dim], in fp32: fewer operations than _filter.
    y = (window.mT * weight.float()).sum(-1).unsqueeze(1)
    return y if bias is None else y.add_(bias)


def _filter(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # Every window of [..., T + width - 1, dim], to [..., T, dim], in fp32.
    taps = weight.float().t().contiguous()
    steps = rows.shape[-2] - len(taps) + 1
    rows = rows.float()
    y = rows[..., :steps, :] * taps[0]
    for i in range(1, len(taps)):
        y.addcmul_(rows[..., i : i + steps, :], taps[i])
    return y if bias is None else y.add_(bias)


def prefill(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    query_start_loc: Tensor,
    seq_lens_cpu: Sequence[int],
    cache_indices: Tensor,
    has_initial_state: Tensor,
    activation: str | bool | None = "silu",
    **unused: Any,
) -> Tensor:
    """Convolve the new tokens of several sequences (prefill); return ``[dim, tokens]``, token-major like ``x``.

    Args:
        x: all tokens, sequence after sequence, ``[dim, tokens]``.
        weight, bias: ``[dim, width]``; ``[dim]`` or None.
        conv_states: pool ``[slots, dim, width - 1]``, updated in place.
        query_start_loc: first token of each sequence, then the end, ``[N + 1]``.
        cache_indices, has_initial_state: slot of each sequence and whether it holds history, ``[N]``.
    """
    tokens, history, slots = x.t(), weight.shape[1] - 1, live_slots(cache_indices)
    stored = conv_states.index_select(0, slots).transpose(1, 2)
    histories = torch.where(has_initial_state[:, None, None], stored, 0).to(x.dtype)
    outputs, states = [], []
    for before, (start, end) in zip(histories, pairwise(query_start_loc.tolist()), strict=True):
        rows = torch.cat([before, tokens[start:end]])
        outputs.append(_filter(rows, weight, bias))
        states.append(rows[len(rows) - history :])
    conv_states.index_copy_(0, slots, torch.stack(states).transpose(1, 2).to(conv_states.dtype))
    return _activate(torch.cat(outputs), activation).to(x.dtype).t()


def update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | bool | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    num_accept_tokens: Tensor | None = None,
    intermediate_conv_window: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    retrieve_next_token: Tensor | None = None,
    **unused: Any,
) -> Tensor:
    """Convolve one token per request (decode) or a block per request (verify); return the shape of ``x``.

    A decode advances ``conv_state``. A verify stores the window after every token instead.

    Args:
        x: ``[bs, dim]`` or ``[bs, dim, T]``, token-major in memory like the result.
        conv_state: pool ``[slots, dim, width - 1]``; conv_state_indices: slot of each request, ``[bs]``.
        weight, bias: ``[dim, width]``; ``[dim]`` or None.
        intermediate_conv_window: verify only, ``[rows, block >= T, dim, width - 1]``, written in place; windows of
            consecutive positions share memory.
        intermediate_state_indices: row of each request in it, ``[bs]``.
    """
    unsupported = (cache_seqlens, num_accept_tokens, retrieve_next_token)
    if conv_state_indices is None or any(argument is not None for argument in unsupported):
        raise NotImplementedError("on a CPU, causal_conv1d_update takes chains and slot-indexed, not circular states")
    tokens = x.unsqueeze(1) if x.dim() == 2 else x.transpose(1, 2)
    width = weight.shape[1]
    slots = live_slots(conv_state_indices)
    history = conv_state.index_select(0, slots).transpose(1, 2).to(x.dtype)
    rows = torch.cat([history, tokens], 1)
    if intermediate_conv_window is None or intermediate_state_indices is None:
        conv_state.index_copy_(0, slots, rows[:, 1 - width :].transpose(1, 2).to(conv_state.dtype))
        y = _filter_one(rows, weight, bias)
    else:
        columns = _columns(intermediate_conv_window, rows.shape[1] - 1)
        columns.index_copy_(0, intermediate_state_indices.long(), rows[:, 1:].transpose(1, 2).to(columns.dtype))
        y = _filter(rows, weight, bias)
    y = _activate(y, activation).to(x.dtype)
    return y.squeeze(1) if x.dim() == 2 else y.transpose(1, 2)


def _columns(windows: Tensor, count: int) -> Tensor:
    # Overlapping windows [rows, block, dim, W] share these columns: [rows, dim, count].
    row, step, dim, column = windows.stride()
    assert step == column, "consecutive windows of a chain must share memory"
    return windows.as_strided((windows.shape[0], windows.shape[2], count), (row, dim, column))


def gdn_convolve(
    x: Tensor, a: Tensor, b: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, slots: Tensor,
    windows: Tensor, rows: Tensor, *, width: int, silu: bool = True, recurrent: Tensor | None = None,
) -> Convolved:  # fmt: skip
    """Convolve as :func:`update` does, in place of a definition that rounds as a GPU."""
    tokens = x[:, : len(weight)].unflatten(0, (-1, width)).transpose(1, 2)
    at = {"conv_state_indices": slots, "intermediate_conv_window": windows, "intermediate_state_indices": rows}
    mixed = update(tokens, states, weight, bias, silu, **at)
    z = x[:, len(weight) :].unflatten(1, (b.shape[1], (x.shape[1] - len(weight)) // b.shape[1]))
    return Convolved(mixed.transpose(1, 2).flatten(0, 1), z, a, b)
