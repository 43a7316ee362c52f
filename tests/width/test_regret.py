"""The adaptive policy on recorded traffic, against the best fixed width of each phase in hindsight."""

from __future__ import annotations

import pytest

from tests.width.regret import RATIOS, STEADY, Phase, over_best, phases_of, regret
from tests.width.traffic import Machine

MACHINES = [pytest.param(Machine(r), id=str(r), marks=[pytest.mark.slow] if r > 2 else []) for r in RATIOS]


@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize("traffic", [*STEADY[:-1], "mixed"])
@pytest.mark.parametrize("machine", MACHINES)
def test_the_speed_is_97_percent_of_that_of_the_best_width_in_each_phase(machine, traffic, size):
    """From the first step on, and with a change of traffic every 300 steps."""
    phases = regret(machine, phases_of(traffic, size), seeds=3)
    assert over_best(phases) >= 0.97, [round(phase.over(), 3) for phase in phases]


@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize("machine", MACHINES)
def test_where_no_draft_is_accepted_the_speed_is_98_percent_of_plain_decodings(machine, size):
    first, *later = regret(machine, phases_of("never", size) * 5, seeds=1)
    assert Phase.sum([first, *later]).over(1) >= 0.98
    assert min(phase.over(1) for phase in later) >= 0.98
    assert first.over(1) >= 0.88  # 12 steps
