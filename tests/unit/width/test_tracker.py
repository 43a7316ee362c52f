"""The filter behind the cost table: who is corrected by an error, and by how much at most."""

from __future__ import annotations

from math import exp, log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_dflash.width.tracker import Tracker


def tracker() -> Tracker:
    return Tracker(2, 3, calibrated=True, plain=10.0, per_token=0.0)


def table_ms(tracked: Tracker, column: int) -> float:
    """The first row's cell; the table says 10 ms everywhere."""
    return 10.0 * exp(tracked.correction[0][column])


def learn(tracked: Tracker, column: int, milliseconds: float, context: int = 0) -> None:
    tracked.learn(0, 0.0, column, table_ms(tracked, column), context, milliseconds)


def test_a_first_error_is_rather_the_machines_and_one_beside_a_settled_cell_that_cells():
    tracked = tracker()
    learn(tracked, 0, 20.0)
    assert log(tracked.scale) > 0.8 * log(2) > 0.2 * log(2) > tracked.correction[0][0]
    for _ in range(50):
        learn(tracked, 0, 20.0)
    settled = tracked.scale
    learn(tracked, 1, 30.0)
    assert tracked.correction[0][1] > 5 * log(tracked.scale / settled) > 0


def test_a_row_that_is_not_involved_stays():
    tracked = tracker()
    learn(tracked, 2, 25.0)
    assert tracked.correction[1] == [0.0, 0.0, 0.0] and tracked.correction[0][:2] == [0.0, 0.0]


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(1e-3, 1e6), st.integers(0, 10**6)), max_size=60))
def test_the_filter_stays_sane_whatever_is_measured(steps):
    tracked = tracker()
    for column, milliseconds, context in steps:
        learn(tracked, column, milliseconds, context)
        assert 0 < tracked.scale < float("inf") and tracked.per_token >= 0
        assert all(0 < variance < 1 for row in tracked.variance for variance in row)


@given(st.floats(1e-3, 1e6))
def test_one_step_moves_a_settled_cell_by_little(milliseconds):
    tracked = tracker()
    for _ in range(100):
        learn(tracked, 0, 10.0)
    before = table_ms(tracked, 0) * tracked.scale
    learn(tracked, 0, milliseconds)
    assert table_ms(tracked, 0) * tracked.scale == pytest.approx(before, rel=0.06)
