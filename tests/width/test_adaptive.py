"""The adaptive policy on synthetic traffic with a known optimum."""

from __future__ import annotations

from random import Random
from statistics import mean
from unittest.mock import patch

import pytest

from sglang_dflash.width import AdaptiveWidth, CostTable
from sglang_dflash.width.adaptive import PATIENCE, Explorer
from tests.width.traffic import Machine, best_width, drive, rate, switches

RATIOS = (1.05, 1.5, 3.0, 8.0)
WARM_UP = 150


def policy(machine: Machine) -> AdaptiveWidth:
    return AdaptiveWidth(CostTable(machine.points()))


@pytest.mark.parametrize("batch_size, steps", [(1, 1500), (4, 1000), (32, 400)])
@pytest.mark.parametrize("ratio", RATIOS)
def test_the_long_run_rate_is_near_that_of_the_best_fixed_width(ratio, batch_size, steps):
    machine = Machine(ratio)
    for hazard in (0.05, 0.3, 0.6, 0.8, 0.95):
        best = best_width(machine, hazard, batch_size)
        run = drive(policy(machine), machine, lambda _, h=hazard: h, steps, lambda _: batch_size)
        reached = run.rate(WARM_UP) / rate(machine, hazard, batch_size, best)
        assert reached >= 0.97, (hazard, best)


@pytest.mark.parametrize("ratio", RATIOS)
def test_a_load_that_changes_every_40_steps_is_served_at_the_best_width_of_each(ratio):
    machine, sizes = Machine(ratio), (1, 32, 2, 16, 8, 4)
    run = drive(policy(machine), machine, lambda _: 0.75, 1500, lambda step: sizes[step // 40 % 6])
    ideal = [
        rate(machine, 0.75, size, best_width(machine, 0.75, size)) * machine.milliseconds(size, width)
        for width, size in zip(run.widths, (sizes[step // 40 % 6] for step in range(1500)), strict=True)
    ]
    assert sum(run.tokens[WARM_UP:]) >= 0.97 * sum(ideal[WARM_UP:])


@pytest.mark.parametrize("before, after", [(0.1, 0.85), (0.85, 0.1), (0.3, 0.95), (0.95, 0.3)])
@pytest.mark.parametrize("batch_size, share", [(4, 0.93), (16, 0.95)])
@pytest.mark.parametrize("ratio", RATIOS[:3])
def test_after_a_change_of_traffic_the_rate_recovers_within_50_steps(ratio, batch_size, share, before, after):
    machine = Machine(ratio)
    best = rate(machine, after, batch_size, best_width(machine, after, batch_size))
    runs = [
        drive(policy(machine), machine, lambda s: before if s < 200 else after, 300, lambda _: batch_size, seed)
        for seed in range(4)
    ]
    assert mean(run.rate(250, 300) for run in runs) >= share * best


def test_where_drafting_is_expensive_it_resumes_within_150_steps():
    machine = Machine(8)
    best = rate(machine, 0.9, 4, best_width(machine, 0.9, 4))
    runs = [drive(policy(machine), machine, lambda s: 0.2 if s < 200 else 0.9, 450, lambda _: 4, s) for s in range(4)]
    assert mean(run.rate(350, 450) for run in runs) >= 0.95 * best


@pytest.mark.parametrize("ratio, before, after", [(1.5, 0.1, 0.85), (1.5, 0.85, 0.1), (3.0, 0.3, 0.95)])
def test_one_request_alone_recovers_within_100_tokens(ratio, before, after):
    machine = Machine(ratio)
    best, recovered = rate(machine, after, 1, best_width(machine, after, 1)), []
    for seed in range(8):
        run = drive(policy(machine), machine, lambda s: before if s < 200 else after, 500, lambda _: 1, seed)
        start = next(step for step in range(200, 500) if sum(run.tokens[200:step]) >= 100)
        recovered.append(run.rate(start, start + 50))
    assert mean(recovered) >= 0.9 * best


def test_noise_alone_rarely_switches_between_two_equally_good_widths():
    tie = next(h / 1000 for h in range(1000) if rate(Machine(3), h / 1000, 4, 8) > rate(Machine(3), h / 1000, 4, 4))
    machine = Machine(3, noise=0.1)
    with patch.object(Explorer, "column", lambda self, best, *rest, **flags: best):
        run = drive(policy(machine), machine, lambda _: tie, 1000, lambda _: 4)
    assert set(run.widths[WARM_UP:]) == {4, 8}
    assert switches(run.widths[WARM_UP:]) <= 30


def test_a_wrong_calibration_is_corrected():
    machine, random = Machine(3), Random(3)
    points = {cell: ms * random.lognormvariate(0.3, 0.2) for cell, ms in machine.points().items()}
    run = drive(AdaptiveWidth(CostTable(points)), machine, lambda _: 0.8, 1200, lambda _: 8)
    assert run.rate(400) >= 0.96 * rate(machine, 0.8, 8, best_width(machine, 0.8, 8))


def test_a_pause_has_a_reason_and_ends_when_drafts_are_accepted():
    machine = Machine(3)
    chosen = policy(machine)
    drive(chosen, machine, lambda _: 0.05, PATIENCE // 2, lambda _: 8)
    assert chosen.paused is None, "a few plain steps are no pause"
    drive(chosen, machine, lambda _: 0.05, 300, lambda _: 8)
    pause = chosen.paused
    assert pause is not None and pause.width == 2 and pause.first_accepted < 0.2
    assert pause.cost == pytest.approx(machine.milliseconds(8, 2) / machine.milliseconds(8, 1), rel=0.1)
    assert pause.tokens < pause.cost
    assert str(pause).startswith("a block of 2 yields")
    drive(chosen, machine, lambda _: 0.9, 100, lambda _: 8)
    assert chosen.paused is None


def test_an_update_of_weights_forgets_acceptance_and_keeps_costs():
    machine = Machine(3)
    learned, fresh = policy(machine), policy(machine)
    for _ in range(300):
        width = learned.width(8, 800)
        learned.observe(width, [1] * 8)
        learned.observe_time(8, width, machine.milliseconds(8, width) * 2)
    assert learned.width(8, 800) == 1 and learned.paused is not None
    learned.forget()
    found, expected = learned.describe(), fresh.describe()
    assert found["survival"] == expected["survival"] and found["paused"] is None
    assert found["costs"] != expected["costs"]
    assert max(learned.width(8, 800) for _ in range(40)) > 1
