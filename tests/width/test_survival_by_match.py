"""Requests that repeat themselves: the adaptive policy with matched rows, on synthetic traffic with a known optimum."""

from __future__ import annotations

from statistics import mean
from unittest.mock import patch

import pytest

from sglang_dflash.width import AdaptiveWidth, CostTable
from sglang_dflash.width.policy import BUCKETS
from sglang_dflash.width.survival import MATCHED_PRIOR, SurvivalByMatch
from tests.width.traffic import WIDTHS, Copying, Machine, drive, drive_copying, yields

WARM_UP = 150
WIDE = (*WIDTHS, 32)
ONE = [tuple(int(k == bucket) for k in range(BUCKETS)) for bucket in range(BUCKETS)]  # request, by its bucket


def policy(machine: Machine, widths: tuple[int, ...] = WIDTHS, block: int | None = None) -> AdaptiveWidth:
    return AdaptiveWidth(CostTable(machine.points(widths=widths)), block)


@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("ratio", [1.5, 3.0, 8.0])
@pytest.mark.parametrize("hazards", [(0.1, 0.95), (0.6, 0.95), (0.8, 0.5)], ids=str)
def test_the_rate_is_near_the_optimum_and_no_worse_than_without_matches(hazards, ratio, batch_size):
    machine, reached, gained = Machine(ratio), [], []
    for share in (0.1, 0.5, 0.9):
        traffic = Copying(*hazards, share)
        run, ideal = drive_copying(policy(machine), machine, lambda _, t=traffic: t, 1200, batch_size)
        blind, best = drive_copying(policy(machine), machine, lambda _, t=traffic: t, 1200, batch_size, sees=False)
        reached.append(sum(run.tokens[WARM_UP:]) / sum(ideal[WARM_UP:]))
        # Shares of the best, as the two runs draw different matches.
        gained.append(reached[-1] * sum(best[WARM_UP:]) / sum(blind.tokens[WARM_UP:]))
    assert min(reached) >= 0.92 and mean(reached) >= 0.94, reached
    assert min(gained) >= 0.97 and mean(gained) >= 0.99, gained


@pytest.mark.parametrize("hazard, batch_size", [(0.7, 8), (0.97, 1)])
def test_traffic_without_matches_is_served_as_if_there_were_no_copies(hazard, batch_size):
    machine = Machine(1.5)
    run = drive(policy(machine), machine, lambda _: hazard, 400, lambda _: batch_size)
    with patch("sglang_dflash.width.survival.MATCHED_PRIOR", 0.1):
        other = drive(policy(machine, WIDE, 16), machine, lambda _: hazard, 400, lambda _: batch_size)
    assert run.widths == other.widths, "widths beyond the block, or the prior of copies, made a difference"


def test_a_match_starts_a_block_at_once_and_the_pause_goes_on_without_one():
    machine = Machine(3)
    chosen = policy(machine)
    drive(chosen, machine, lambda _: 0.05, 300, lambda _: 1)
    pause = chosen.paused
    assert pause is not None and chosen.width(1, 1000) == 1
    assert chosen.width(1, 1001, ONE[4]) > 1
    chosen.observe(1, [1])
    assert chosen.width(1, 1002) == 1 and chosen.paused is pause and chosen.describe()["pauses"] == 1


def test_widths_beyond_the_drafters_block_are_chosen_for_matches_that_pay():
    for ratio, pays in ((1.5, True), (8.0, False)):
        machine, traffic = Machine(ratio), Copying(0.5, 0.98, 0.5, stays=40, taken=1.0)
        chosen = policy(machine, WIDE, 16)
        run, ideal = drive_copying(chosen, machine, lambda _, t=traffic: t, 1500, 1)
        assert (run.widths.count(32) > 300) is pays
        assert sum(run.tokens[WARM_UP:]) >= 0.92 * sum(ideal[WARM_UP:])
        assert chosen.survival.max_width == 16 and chosen.by_match.matched.max_width == 32


def test_tokens_accepted_beyond_the_drafters_block_without_a_match_do_not_count():
    rows = SurvivalByMatch(WIDE, 16)
    for _ in range(100):
        rows.observe(32, [32, 32], [0, 0])
    assert rows.tokens(16)[-1] == rows.tokens(16)[-2] <= 16
    assert rows.tokens(16, ONE[4])[-1] == pytest.approx(yields(MATCHED_PRIOR, 32))
