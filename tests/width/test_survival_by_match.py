"""Requests that repeat themselves: the adaptive policy with matched rows; their speed: ``test_regret.py``."""

from __future__ import annotations

import pytest

from sglang_dflash.width.policy import BUCKETS
from tests.width.traffic import WIDTHS, Machine, adaptive, drive

WIDE = (*WIDTHS, 32)
ONE = [tuple(int(k == bucket) for k in range(BUCKETS)) for bucket in range(BUCKETS)]  # request, by its bucket


def test_a_match_starts_a_block_at_once_and_the_pause_goes_on_without_one():
    machine = Machine(3)
    chosen = adaptive(machine)
    drive(chosen, machine, lambda _: 0.05, 300, 1)
    pause = chosen.paused
    assert pause is not None and min(chosen.width(1) for _ in range(2)) == 1  # one may be a probe
    assert chosen.width(1, ONE[4]) > 1
    chosen.observe(1, [1])
    assert min(chosen.width(1) for _ in range(2)) == 1 and chosen.paused is pause and chosen.describe()["pauses"] == 1


@pytest.mark.parametrize(("ratio", "pays"), [(1.5, True), (8.0, False)])
def test_widths_beyond_the_drafters_block_are_chosen_for_matches_that_pay(ratio, pays):
    machine = Machine(ratio)
    chosen = adaptive(machine, WIDE, 16)
    run = drive(chosen, machine, lambda _: 0.98, 300, 1, bucket=4)
    assert (run.widths.count(32) > 200) is pays
    assert chosen.survival.max_width == 16 and chosen.by_bucket[4].max_width == 32
