"""Probes: what they may lose, and when they come."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_dflash.width.explore import CLOSER, DOUBT, DOUBT_EVERY, DOWN_EVERY, REGULAR, SAVED, UP_EVERY, Explorer

ROW = [10.0, 15.0, 30.0]
TOKENS = [1.0, 1.2, 1.3]


def columns(explorer: Explorer, steps: int, best: int = 0, row=ROW, tokens=TOKENS, shortest=None, **what: bool):
    return [explorer.column(best, row, tokens, lambda: shortest or row, **what) for _ in range(steps)]


def loss(probe: int, best: int, row=ROW, tokens=TOKENS) -> float:
    return row[probe] - tokens[probe] * row[best] / tokens[best]


def test_the_next_wider_width_is_probed_as_often_as_its_loss_can_be_afforded():
    chosen = columns(Explorer(), 2000)
    assert set(chosen) == {0, 1}
    assert chosen.count(1) == pytest.approx(2000 * REGULAR * ROW[0] / loss(1, 0), rel=0.1)


def test_a_probe_that_loses_more_than_a_step_comes_too():
    row = [10.0, 25.0, 60.0]
    chosen = columns(Explorer(), 2000, row=row)
    assert chosen.count(1) == pytest.approx(2000 * REGULAR * row[0] / loss(1, 0, row), abs=1.5)


def test_a_wider_one_that_hardly_loses_more_is_tried_in_its_place():
    """Where a step's fixed part is most of it, a wider block says more for the same."""
    assert set(columns(Explorer(), 400, row=[10.0, 15.0, 15.5])) == {0, 2}
    assert set(columns(Explorer(), 400, row=[10.0, 15.0, 18.0])) == {0, 1}


def test_other_requests_are_looked_at_ahead_of_what_was_saved():
    explorer, row = Explorer(), [10.0, 25.0, 60.0]
    columns(explorer, UP_EVERY, row=row)
    assert columns(explorer, 1, row=row, others=True) == [1]
    assert 1 not in columns(explorer, UP_EVERY, row=row, others=True), "the purse is in debt"


def test_a_probe_that_loses_nothing_still_leaves_steps_between():
    chosen = columns(Explorer(), 800, tokens=[1.0, 1.5, 1.6])
    assert chosen.count(1) == 800 // UP_EVERY


def test_the_next_narrower_width_is_probed_rarely():
    chosen = columns(Explorer(), 10 * DOWN_EVERY, best=2, tokens=[1.0, 1.9, 3.8])
    assert 5 <= chosen.count(1) <= 10 and chosen.count(0) == 0


def test_on_a_suspicion_a_probe_follows_at_once_as_wide_as_is_not_too_dear_and_waits_for_its_outcome():
    explorer = Explorer()
    columns(explorer, 600)
    columns(explorer, 1 + UP_EVERY - 600 % UP_EVERY)  # the regular one is behind
    assert columns(explorer, 3, suspicious=True) == [1, 0, 0]
    explorer.observe(1, 2.0)  # it paid: 2 tokens in 15 ms
    assert columns(explorer, 2, suspicious=True) == [1, 0]


def test_on_a_suspicion_the_cheapest_is_tried_where_all_are_dear():
    explorer, row = Explorer(), [10.0, 22.0, 60.0]
    columns(explorer, 600, row=row)
    columns(explorer, UP_EVERY + 1, row=row, others=True)
    assert columns(explorer, 2, row=row, suspicious=True) == [1, 0]


def test_a_width_whose_time_is_in_doubt_is_tried_if_it_might_be_the_best():
    shortest = [10.0, 15.0, 12.0]
    chosen = columns(Explorer(), DOUBT_EVERY, row=[10.0, 15.0, 14.0], shortest=shortest)
    assert chosen == [0] * (DOUBT_EVERY - 1) + [2]


def test_a_table_without_calibration_is_visited_first():
    assert columns(Explorer([0, 1, 2]), 4) == [0, 1, 2, 0]


@given(
    st.tuples(*[st.floats(1, 100)] * 3).map(sorted),
    st.tuples(*[st.floats(0, 1)] * 2),
    st.booleans(),
    st.integers(0, 1000),
)
def test_expected_losses_stay_within_the_budget(row, gains, suspicious, seed):
    """Whatever the costs: a share of the time, and what the purses held at first or may overdraw by once."""
    tokens = [1.0, 1.0 + gains[0], 1.0 + gains[0] + gains[1]]
    best = max(range(3), key=lambda column: tokens[column] / row[column])
    explorer, steps, lost, random = Explorer(), 600, 0.0, Random(seed)
    for _ in range(steps):
        shortest = [ms * random.uniform(0.5, 1) for ms in row]
        others = random.random() < 0.1
        column = explorer.column(best, row, tokens, lambda s=shortest: s, suspicious=suspicious, others=others)
        lost += loss(column, best, row, tokens)
        explorer.observe(column, tokens[column])
    assert lost <= (REGULAR + CLOSER + DOUBT) * steps * row[best] + (3 * SAVED) * row[best]
