"""The adaptive policy on synthetic traffic with a known optimum."""

from __future__ import annotations

from random import Random

import pytest

from sglang_dflash.width import AdaptiveWidth, CostTable
from sglang_dflash.width.adaptive import PATIENCE
from sglang_dflash.width.policy import BUCKETS
from tests.width.traffic import WIDTHS, Machine, adaptive, best_width, drive, rate


def test_a_wrong_calibration_is_corrected():
    machine, random = Machine(3), Random(3)
    points = {cell: ms * random.lognormvariate(0.3, 0.2) for cell, ms in machine.points().items()}
    run = drive(AdaptiveWidth(CostTable(points)), machine, lambda _: 0.8, 1200, 8)
    assert run.rate(400) >= 0.96 * rate(machine, 0.8, 8, best_width(machine, 0.8, 8))


def test_a_pause_has_a_reason_and_ends_when_drafts_are_accepted():
    machine = Machine(3)
    chosen = adaptive(machine)
    drive(chosen, machine, lambda _: 0.05, PATIENCE // 2, 8)
    assert chosen.paused is None, "a few plain steps are no pause"
    drive(chosen, machine, lambda _: 0.05, 300, 8)
    pause = chosen.paused
    assert pause is not None and pause.width == 2 and pause.first_accepted < 0.2
    assert pause.cost == pytest.approx(machine.milliseconds(8, 2) / machine.milliseconds(8, 1), rel=0.1)
    assert pause.tokens < pause.cost
    assert str(pause).startswith("a block of 2 yields")
    drive(chosen, machine, lambda _: 0.9, 100, 8)
    assert chosen.paused is None


def test_an_update_of_weights_forgets_acceptance_and_keeps_costs():
    machine = Machine(3)
    learned, fresh = adaptive(machine), adaptive(machine)
    for _ in range(300):
        width = learned.width(8)
        learned.observe(width, [1] * 8)
        learned.observe_time(8, width, machine.milliseconds(8, width) * 2)
    assert learned.width(8) == 1 and learned.paused is not None
    learned.forget()
    found, expected = learned.describe(), fresh.describe()
    assert found["survival"] == expected["survival"] and found["paused"] is None
    assert found["costs"] != expected["costs"]
    assert max(learned.width(8) for _ in range(40)) > 1


# --- requests that repeat themselves; their speed: test_regret.py

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
