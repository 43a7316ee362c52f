"""The filter behind the cost table: who is corrected by an error, and by how much at most."""

from __future__ import annotations

from math import exp, log
from random import Random

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
    tracked.learn(0, 0.0, column, table_ms(tracked, column), 1, context, milliseconds)


def test_an_error_beside_a_settled_cell_is_that_cells():
    tracked = tracker()
    for _ in range(50):
        learn(tracked, 0, 20.0)
    before = tracked.milliseconds([10.0], 1, 0)[0]
    learn(tracked, 1, 30.0)
    assert tracked.correction[0][1] > 2 * log(tracked.milliseconds([10.0], 1, 0)[0] / before) > 0


def test_what_the_scheduler_adds_is_told_apart_from_a_slower_machine():
    for added, slower in ((8.0, 1.0), (0.0, 1.3)):
        tracked, random = tracker(), Random(0)
        for _ in range(200):
            column = random.choice((0, 1))
            truth = (10.0, 20.0)[column] * slower + added
            tracked.learn(0, 0.0, column, (10.0, 20.0)[column] * exp(tracked.correction[0][column]), 1, 0, truth)
        assert tracked.milliseconds([60.0], 1, 0)[0] == pytest.approx(60.0 * slower + added, rel=0.12)


def test_what_each_request_adds_is_the_same_at_every_width():
    tracked = tracker()
    for batch_size in (1, 4, 16) * 60:
        tracked.learn(0, 0.0, 0, table_ms(tracked, 0), batch_size, 0, 10.0 + 0.5 * batch_size)
    assert tracked.milliseconds([60.0], 16, 0)[0] == pytest.approx(68.0, rel=0.1)


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
