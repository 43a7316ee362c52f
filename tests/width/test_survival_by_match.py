"""Requests that repeat themselves: the adaptive policy with matched rows, on synthetic traffic with a known optimum."""

from __future__ import annotations

import json
from random import Random
from statistics import mean
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_dflash.width import AdaptiveWidth, CostTable
from sglang_dflash.width.survival import MATCHED_PRIOR, SurvivalByMatch
from tests.width.traffic import WIDTHS, Copying, Machine, Run, drive, drive_copying, yields

WARM_UP = 150
WIDE = (*WIDTHS, 32)
ROWS = st.integers(1, 16).flatmap(
    lambda width: st.tuples(
        st.just(width), st.lists(st.tuples(st.integers(1, width), st.booleans()), min_size=1, max_size=8)
    )
)


def policy(machine: Machine, widths: tuple[int, ...] = WIDTHS, block: int | None = None) -> AdaptiveWidth:
    return AdaptiveWidth(CostTable(machine.points(widths=widths)), block)


@given(st.lists(ROWS, max_size=20))
def test_each_kind_of_row_is_counted_apart_as_if_the_other_were_not_there(steps):
    both, unmatched, matched = (SurvivalByMatch(WIDTHS, 16) for _ in range(3))
    for width, rows in steps:
        both.observe(width, [length for length, _ in rows], [match for _, match in rows])
        for survival, kind in ((unmatched, False), (matched, True)):
            lengths = [length for length, match in rows if match is kind]
            survival.observe(width if lengths else 1, lengths, [kind] * len(lengths))
    assert both.tokens(0.0) == pytest.approx(unmatched.tokens(0.0))
    assert both.tokens(1.0) == pytest.approx(matched.tokens(1.0))
    mixed = [(3 * ours + theirs) / 4 for ours, theirs in zip(both.tokens(0.0), both.tokens(1.0), strict=True)]
    assert both.tokens(0.25) == pytest.approx(mixed)


@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("ratio", [1.5, 3.0, 8.0])
@pytest.mark.parametrize("hazards", [(0.1, 0.95), (0.6, 0.95), (0.8, 0.5)], ids=str)
def test_the_rate_is_near_that_of_one_who_knows_all_matches_and_no_worse_than_without_them(hazards, ratio, batch_size):
    machine, reached, gained = Machine(ratio), [], []
    for share in (0.1, 0.5, 0.9):
        traffic = Copying(*hazards, share)
        run, ideal = drive_copying(policy(machine), machine, lambda _, t=traffic: t, 1200, batch_size)
        deaf, best = drive_copying(policy(machine), machine, lambda _, t=traffic: t, 1200, batch_size, told=False)
        reached.append(sum(run.tokens[WARM_UP:]) / sum(ideal[WARM_UP:]))
        # Shares of the best, as the two runs draw different matches.
        gained.append(reached[-1] * sum(best[WARM_UP:]) / sum(deaf.tokens[WARM_UP:]))
    assert min(reached) >= 0.92 and mean(reached) >= 0.94, reached
    assert min(gained) >= 0.97 and mean(gained) >= 0.99, gained


def test_where_drafts_do_not_pay_and_copies_do_the_gain_is_large():
    """A drafter that never helps, requests that repeat half of what they say: pooled survival serves neither."""
    machine, traffic = Machine(3), Copying(0.1, 0.95, 0.5)
    run, _ = drive_copying(policy(machine), machine, lambda _: traffic, 3000, 1)
    deaf, _ = drive_copying(policy(machine), machine, lambda _: traffic, 3000, 1, told=False)
    assert run.rate(WARM_UP) >= 1.2 * deaf.rate(WARM_UP)


@pytest.mark.parametrize("hazard, batch_size", [(0.7, 8), (0.97, 1)])
def test_traffic_without_matches_is_served_as_if_there_were_no_copies(hazard, batch_size):
    machine = Machine(1.5)
    run = drive(policy(machine), machine, lambda _: hazard, 400, lambda _: batch_size)
    with patch("sglang_dflash.width.survival.MATCHED_PRIOR", 0.1):
        other = drive(policy(machine, WIDE, 16), machine, lambda _: hazard, 400, lambda _: batch_size)
    assert run.widths == other.widths, "widths beyond the block, or what is thought of copies, made a difference"


def test_matches_that_are_seldom_worth_anything_cost_next_to_nothing():
    machine, rest = Machine(3), Copying(0.05, 0.05, 0.5)
    run, ideal = drive_copying(policy(machine), machine, lambda _: rest, 2000, 4)
    assert sum(run.tokens[WARM_UP:]) >= 0.97 * sum(ideal[WARM_UP:])


def test_a_match_wakes_a_resting_drafter_at_once_and_the_pause_goes_on_without_one():
    machine = Machine(3)
    chosen = policy(machine)
    drive(chosen, machine, lambda _: 0.05, 300, lambda _: 1)
    pause = chosen.paused
    assert pause is not None and chosen.width(1, 1000, 0.0) == 1
    assert chosen.width(1, 1001, 1.0) > 1
    chosen.observe(1, [1])
    assert chosen.width(1, 1002, 0.0) == 1 and chosen.paused is pause and chosen.describe()["pauses"] == 1


@pytest.mark.parametrize("first, later", [(0.05, 0.95), (0.95, 0.05)])
def test_when_the_worth_of_copies_changes_the_policy_follows(first, later):
    """Drafts never pay here: only evidence of matched rows can tell, and it is old when they come seldom."""
    machine, before, after = Machine(3), Copying(0.1, first, 0.4), Copying(0.1, later, 0.4)
    reached = []
    for seed in range(4):
        traffic = lambda step: before if step < 400 else after  # noqa: E731
        run, ideal = drive_copying(policy(machine), machine, traffic, 1000, 2, seed)
        reached.append(sum(run.tokens[600:]) / sum(ideal[600:]))
    assert mean(reached) >= 0.93, reached


def test_blocks_beyond_the_drafters_are_for_batches_that_match_and_only_if_they_pay():
    for ratio, pays in ((1.5, True), (8.0, False)):
        machine, traffic = Machine(ratio), Copying(0.5, 0.98, 0.5, stays=40, taken=1.0)
        chosen = policy(machine, WIDE, 16)
        run, ideal = drive_copying(chosen, machine, lambda _, t=traffic: t, 1500, 1)
        assert (run.widths.count(32) > 300) is pays
        assert sum(run.tokens[WARM_UP:]) >= 0.92 * sum(ideal[WARM_UP:])
        assert chosen.survival.max_width == 16 and chosen.by_match.matched.max_width == 32


def test_plain_decoding_and_blocks_wider_than_the_drafters_are_enough_widths():
    machine = Machine(3)
    chosen = policy(machine, (1, 32), 16)
    run = drive(chosen, machine, lambda _: 0.05, 100, lambda _: 1)
    assert run.widths[-1] == 1 and chosen.paused is not None and chosen.paused.width == 32


def test_what_passes_beyond_the_block_in_an_unmatched_row_is_luck():
    rows = SurvivalByMatch(WIDE, 16)
    for _ in range(100):
        rows.observe(32, [32, 32], [False, False])
    assert rows.tokens(0.0)[-1] == rows.tokens(0.0)[-2] <= 16
    assert rows.tokens(1.0)[-1] == pytest.approx(yields(MATCHED_PRIOR, 32))


def test_both_curves_are_described():
    machine, random = Machine(1.5), Random(0)
    chosen = policy(machine)
    for _ in range(100):
        width = chosen.width(4, 100, 0.5)
        lengths = [random.randint(1, width), 1, width, width]
        chosen.observe(width, lengths, [False, False, True, True])
    described = json.loads(json.dumps(chosen.describe()))
    assert described["survival"]["curve"][0] < 0.7 < 0.95 < described["survival_of_matched"]["curve"][0]


def test_runs_are_what_they_say():
    """The traffic's optimum by hand: a step of one row, half matched, width 2."""
    traffic = Copying(0.2, 0.8, taken=0.5)
    assert traffic.yields(2, 1.0) == pytest.approx(1 + 0.5 * 0.8 + 0.5 * 0.2)
    assert traffic.yields(32, 0.0) == traffic.yields(16, 0.0)
    assert isinstance(drive_copying(policy(Machine(3)), Machine(3), lambda _: traffic, 3, 1)[0], Run)
