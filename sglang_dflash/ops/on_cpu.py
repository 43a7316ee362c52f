"""The search for copies on a CPU: the definition's comparisons of all positions would take as long as a small model."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from sglang_dflash.ops import reference


def find_copies(history: Tensor, found: Tensor, rows: Tensor, last: Tensor, *, longest: int, bound: int) -> None:
    """As :func:`sglang_dflash.ops.reference.find_copies`: others are compared only where the newest occurs."""
    table, keys, back = history.numpy(), found.numpy(), np.arange(longest)
    for row, newest in zip(rows.numpy(), last.numpy(), strict=True):
        tokens = table[row]
        wanted = tokens[max(0, newest + 1 - longest) : newest + 1][::-1]
        ends = np.flatnonzero(tokens[:newest] == wanted[0]) if wanted[0] >= 0 else np.empty(0, np.int64)
        if not len(ends):
            keys[row, 0] = 0
            continue
        positions = ends[:, None] - back[: len(wanted)]
        differs = (tokens[positions] != wanted) | (positions < 0) | (wanted < 0)
        lengths = np.where(differs.any(1), differs.argmax(1), len(wanted))
        newest_longest = len(ends) - 1 - int(lengths[::-1].argmax())
        keys[row, 0] = (int(lengths[newest_longest]) << 32) + int(ends[newest_longest])


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
