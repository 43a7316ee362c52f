"""Depthwise causal convolution over time; a state pool keeps the last ``width - 1`` inputs of every request.

Everything here works on *rows* ``[..., time, dim]``: the history of a sequence (``width - 1`` rows, oldest
first) followed by its tokens. Token t of the output reads rows t .. t + width - 1, so the state after token t
is rows t + 1 .. t + width - 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

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


class _PackedRows(NamedTuple):
    """Rows of all sequences one after another, each with its history first."""

    order: Tensor  # [sum(W + len)] index into (all histories, then all tokens)
    windows: Tensor  # [tokens] the first row of each token's window
    tails: Tensor  # [N, W] the last W rows of each sequence: its next state


@lru_cache(maxsize=8)
def _pack(starts: tuple[int, ...], history: int) -> _PackedRows:
    # Sequences begin at ``starts``, whose last entry is the end; ``history`` is width - 1.
    count = len(starts) - 1
    order, windows, tails = [], [], []
    for i, (start, end) in enumerate(pairwise(starts)):
        first = start + i * history
        order += [torch.arange(i * history, (i + 1) * history), torch.arange(start, end) + count * history]
        windows.append(torch.arange(first, first + end - start))
        tails.append(torch.arange(first + end - start, first + end - start + history))
    return _PackedRows(torch.cat(order), torch.cat(windows), torch.stack(tails))


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
    """Convolve the new tokens of several sequences (prefill).

    Args:
        x: all tokens, sequence after sequence, ``[dim, tokens]``.
        weight: ``[dim, width]``; bias: ``[dim]`` or None.
        conv_states: pool ``[slots, dim, width - 1]``; the rows of these sequences are updated in place.
        query_start_loc: first token of each sequence, then the end, ``[N + 1]``; ``seq_lens_cpu`` repeats it.
        cache_indices: slot of each sequence, ``[N]``; negative for padding.
        has_initial_state: whether the slot holds history to continue from, bool ``[N]``.

    Returns:
        ``[dim, tokens]``, token-major in memory like ``x``.
    """
    dim, width = weight.shape
    layout = _pack(tuple(query_start_loc.tolist()), width - 1)
    slots = live_slots(cache_indices)
    stored = conv_states.index_select(0, slots).transpose(1, 2)
    histories = torch.where(has_initial_state[:, None, None], stored, 0).to(x.dtype)
    rows = torch.cat([histories.reshape(-1, dim), x.t()]).index_select(0, layout.order)
    conv_states.index_copy_(0, slots, rows[layout.tails].transpose(1, 2).to(conv_states.dtype))
    # Windows that straddle two sequences are computed too, and dropped by the selection.
    y = _filter(rows, weight, bias).index_select(0, layout.windows)
    return _activate(y, activation).to(x.dtype).t()


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
    """Convolve one token per request (decode) or a block per request (verify).

    A decode advances ``conv_state`` in place. A verify leaves it as it is and stores the window after every
    token, so that the commit can pick the accepted one.

    Args:
        x: ``[bs, dim]`` or ``[bs, dim, T]``.
        conv_state: pool ``[slots, dim, width - 1]``.
        weight: ``[dim, width]``; bias: ``[dim]`` or None.
        conv_state_indices: slot of each request, ``[bs]``; negative for padding.
        intermediate_conv_window: verify only, ``[rows, block >= T, dim, width - 1]``; written in place. Windows of
            consecutive positions share their memory, as SGLang allocates them for chains.
        intermediate_state_indices: row of each request in it, ``[bs]``.

    Returns:
        The shape of ``x``, token-major in memory.
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
