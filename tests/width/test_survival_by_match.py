"""Requests that repeat themselves: the adaptive policy with matched rows; their speed: ``test_regret.py``."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from sglang_dflash.width import AdaptiveWidth, CostTable
from sglang_dflash.width.policy import BUCKETS
from sglang_dflash.width.survival import MATCHED_PRIOR
from tests.width.traffic import WIDTHS, Machine, drive, yields

WIDE = (*WIDTHS, 32)
ONE = [tuple(int(k == bucket) for k in range(BUCKETS)) for bucket in range(BUCKETS)]  # request, by its bucket


def policy(machine: Machine, widths: tuple[int, ...] = WIDTHS, block: int | None = None) -> AdaptiveWidth:
    return AdaptiveWidth(CostTable(machine.points(widths=widths)), block)


@pytest.mark.parametrize("hazard, batch_size", [(0.7, 8), (0.97, 1)])
def test_traffic_without_matches_is_served_as_if_there_were_no_copies(hazard, batch_size):
    machine = Machine(1.5)
    run = drive(policy(machine), machine, lambda _: hazard, 400, lambda _: batch_size)
    with patch("sglang_dflash.width.adaptive.MATCHED_PRIOR", 0.1):
        other = drive(policy(machine, WIDE, 16), machine, lambda _: hazard, 400, lambda _: batch_size)
    assert run.widths == other.widths, "widths beyond the block, or the prior of copies, made a difference"


def test_a_match_starts_a_block_at_once_and_the_pause_goes_on_without_one():
    machine = Machine(3)
    chosen = policy(machine)
    drive(chosen, machine, lambda _: 0.05, 300, lambda _: 1)
    pause = chosen.paused
    assert pause is not None and min(chosen.width(1) for _ in range(2)) == 1  # one may be a probe
    assert chosen.width(1, ONE[4]) > 1
    chosen.observe(1, [1])
    assert min(chosen.width(1) for _ in range(2)) == 1 and chosen.paused is pause and chosen.describe()["pauses"] == 1


@pytest.mark.parametrize(("ratio", "pays"), [(1.5, True), (8.0, False)])
def test_widths_beyond_the_drafters_block_are_chosen_for_matches_that_pay(ratio, pays):
    machine = Machine(ratio)
    chosen = policy(machine, WIDE, 16)
    run = drive(chosen, machine, lambda _: 0.98, 300, lambda _: 1, bucket=4)
    assert (run.widths.count(32) > 200) is pays
    assert chosen.survival.max_width == 16 and chosen.by_bucket[4].max_width == 32


def test_tokens_accepted_beyond_the_drafters_block_without_a_match_do_not_count():
    chosen = policy(Machine(1.5), WIDE, 16)
    for _ in range(100):
        chosen.observe(32, [32, 32], [0, 0])
    found = chosen.survival.tokens_if_always(WIDE, 16)
    assert found[-1] == found[-2] <= 16
    assert chosen.by_bucket[4].tokens[32] == pytest.approx(yields(MATCHED_PRIOR, 32))
