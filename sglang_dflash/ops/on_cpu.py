"""The search for copies on a CPU: the definition's comparisons of all positions would take as long as a small model."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from sglang_dflash.ops import reference


def find_copies(history: Tensor, found: Tensor, rows: Tensor, last: Tensor, *, longest: int, bound: int) -> None:
    """As :func:`sglang_dflash.ops.reference.find_copies`: only positions that still match are looked at again."""
    table, keys = history.numpy(), found.numpy()
    for row, newest in zip(rows.numpy(), last.numpy(), strict=True):
        tokens, length = table[row], 0
        ends = np.flatnonzero(tokens[:newest] == tokens[newest]) if tokens[newest] >= 0 else np.empty(0, np.int64)
        keys[row, 0] = 0
        while len(ends):
            length += 1
            keys[row, 0] = (length << 32) + int(ends[-1])
            if length == longest or tokens[newest - length] < 0:
                break
            ends = ends[ends >= length]
            ends = ends[tokens[ends - length] == tokens[newest - length]]


def offer_copies(
    tokens: Tensor,
    margins: Tensor,
    history: Tensor,
    found: Tensor,
    rows: Tensor,
    last: Tensor,
    *,
    least: int,
    unsure: float,
) -> None:
    """As :func:`sglang_dflash.ops.reference.offer_copies`; mostly there is nothing to offer."""
    state = found.numpy()
    if (state[rows.numpy(), 0] >> 32 >= least).any():
        reference.offer_copies(tokens, margins, history, found, rows, last, least=least, unsure=unsure)
    else:
        state[rows.numpy(), 1] = 0
