"""Probes of other widths: their budget and their schedule."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_dflash.width.adaptive import (
    EVERY,
    PROMPTED,
    SAVED,
    SCHEDULED,
    Explorer,
)

ROW = [10.0, 15.0, 30.0]
TOKENS = [1.0, 1.2, 1.3]


def columns(explorer: Explorer, steps: int, row=ROW, tokens=TOKENS, lower_bounds=None, **flags: bool) -> list[int]:
    return [explorer.column(0, row, tokens, lambda: lower_bounds or row, **flags) for _ in range(steps)]


def loss(probe: int, best: int, row=ROW, tokens=TOKENS) -> float:
    return row[probe] - tokens[probe] * row[best] / tokens[best]


@pytest.mark.parametrize("row", [ROW, [10.0, 25.0, 60.0]], ids=["cheap", "more than a step"])
def test_the_next_wider_width_is_probed_as_often_as_the_budget_allows(row):
    chosen = columns(Explorer(), 2000, row=row)
    assert set(chosen) == {0, 1}
    assert chosen.count(1) == pytest.approx(2000 * SCHEDULED * row[0] / loss(1, 0, row), rel=0.1, abs=1.5)


def test_the_widest_width_that_loses_hardly_more_is_probed_instead():
    assert set(columns(Explorer(), 400, row=[10.0, 15.0, 15.5])) == {0, 2}
    assert set(columns(Explorer(), 400, row=[10.0, 15.0, 18.0])) == {0, 1}


def test_a_changed_batch_is_probed_on_credit():
    explorer, row = Explorer(), [10.0, 25.0, 60.0]
    columns(explorer, EVERY, row=row)
    assert columns(explorer, 1, row=row, changed=True) == [1]
    assert 1 not in columns(explorer, EVERY, row=row, changed=True), "the budget is overdrawn"


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
