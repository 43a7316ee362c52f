"""Probes of other widths: their budget and their schedule."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from sglang_dflash.width.adaptive import PROMPTED, SAVED, SCHEDULED, Explorer

ROW = [10.0, 15.0, 30.0]
TOKENS = [1.0, 1.2, 1.3]


def loss(probe: int, best: int, row=ROW, tokens=TOKENS) -> float:
    return row[probe] - tokens[probe] * row[best] / tokens[best]


@given(
    st.tuples(*[st.floats(1, 100)] * 3).map(sorted),
    st.tuples(*[st.floats(0, 1)] * 2),
    st.booleans(),
    st.integers(0, 1000),
)
def test_expected_losses_stay_within_the_budget(row, gains, improved, seed):
    """A share of the time, the first balance and one overdraft, at any costs."""
    tokens = [1.0, 1.0 + gains[0], 1.0 + gains[0] + gains[1]]
    best = max(range(3), key=lambda column: tokens[column] / row[column])
    explorer, steps, lost, random = Explorer(), 600, 0.0, Random(seed)
    for _ in range(steps):
        bounds = [ms * random.uniform(0.5, 1) for ms in row]
        other = random.random() < 0.1
        column = explorer.column(best, row, tokens, bounds.copy, improved=improved, changed=other)
        lost += loss(column, best, row, tokens)
    assert lost <= (SCHEDULED + PROMPTED) * steps * row[best] + 3 * SAVED * row[best]
