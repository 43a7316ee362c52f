"""The step-time filter: its update against the textbook formula, and how an error is shared."""

from __future__ import annotations

from math import exp, log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_dflash.width.filter import CELL_STEP, CONSTANT_STEP, DRIFT_STEP, NOISE, StepTimeFilter


def step_filter() -> StepTimeFilter:
    return StepTimeFilter(2, 3, calibrated=True, plain=10.0)


def learn(filter: StepTimeFilter, column: int, ms: float, size: int = 1, context: int = 0, table: float = 10.0) -> None:
    """A step on the first row."""
    corrected = table * exp(filter.correction[0][column])
    filter.learn(((0, 1.0), (1, 0.0)), column, corrected, size, context, ms)


def predicted(filter: StepTimeFilter, table_ms: float, batch_size: int = 1) -> float:
    return filter.milliseconds([table_ms], batch_size, 0)[0]


def test_an_update_is_the_kalman_step_of_the_docstring():
    filter = step_filter()
    x, cells = np.zeros(6), [(0, 0.25), (1, 0.75)]
    p = np.diag([*np.diag(filter._covariance), filter.variance[0][1], filter.variance[1][1]])
    q = np.diag([DRIFT_STEP, CONSTANT_STEP * p[1, 1], 0, 0, 0, 0])
    h = np.array([1, 1 / 20, 4 / 20, 1000 / 20, 0.25, 0.75])  # nothing is learned: the table's 20 ms are predicted
    p = p + q
    k = p @ h / (h @ p @ h + NOISE)
    x, p = x + k * log(25 / 20), p - np.outer(k, h @ p)
    filter.learn(cells, 1, 20.0, 4, 1000, 25.0)
    found = [*filter._x, filter.correction[0][1], filter.correction[1][1]]
    assert found == pytest.approx(list(x))
    assert np.array(filter._covariance) == pytest.approx(p[:4, :4])
    for row, share in cells:
        assert filter.variance[row][1] == pytest.approx(p[4 + row, 4 + row] + share * CELL_STEP)
        assert filter.correction[row][0] == filter.correction[row][2] == 0


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(1e-3, 1e6), st.integers(0, 10**6)), max_size=60))
def test_the_state_stays_sane_and_an_outlier_moves_a_settled_cell_little(steps):
    filter = step_filter()
    for _ in range(100):
        learn(filter, 0, 10.0)
    for number, (column, ms, context) in enumerate(steps):
        before = predicted(filter, 10.0 * exp(filter.correction[0][0]))
        learn(filter, column, ms, context=context)
        assert 0 < filter.scale < float("inf") and filter.per_token >= 0
        assert all(0 < variance < 1 for row in filter.variance for variance in row)
        if number == 0:
            assert predicted(filter, 10.0 * exp(filter.correction[0][0])) == pytest.approx(before, rel=0.06)
