"""One scenario in every test run; ``make rehearse`` runs them all."""

from __future__ import annotations

from tests.rehearsal.run import both, differences
from tests.rehearsal.scenarios import SCENARIOS


def test_the_gpu_path_answers_as_the_torch_platform_does() -> None:
    scenario = SCENARIOS[0]
    assert differences(scenario, *both(scenario)) == []
