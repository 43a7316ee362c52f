"""The CUSUM: its formula, its restart, and what it remembers of the moment before."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_dflash.width.change import CERTAIN, TILT, Change


def test_the_score_grows_by_the_log_likelihood_ratio_and_never_falls_below_zero():
    change = Change("before")
    assert not change.is_certain(2.0, 1.0)
    assert change.score == pytest.approx(TILT * 2 - TILT**2 / 2) and change.rose
    change.is_certain(-5.0, 1.0)
    assert change.score == 0 and not change.rose and change.before == "before"


@given(st.lists(st.tuples(st.floats(-5, 0), st.floats(0, 5)), max_size=50))
def test_nothing_in_excess_is_never_a_change(steps):
    change = Change(None)
    assert not any(change.is_certain(*step) for step in steps)


def test_enough_in_excess_is_certain():
    change = Change(None)
    steps = 1
    while not change.is_certain(1.0, 0.2):
        steps += 1
    assert steps == int(CERTAIN / (TILT - TILT**2 / 2 * 0.2)) + 1
