"""Rehearsed scenarios against the CPU platform, and short ones in ``make test``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sglang_dflash.check.machine import GPUS
from sglang_dflash.launch.attention import default_backend
from tests.rehearsal import backends
from tests.rehearsal.run import both, differences
from tests.rehearsal.scenarios import (
    BACKEND_SCENARIOS,
    ONE_FORWARD_SCENARIOS,
    SCENARIOS,
    SHORT,
    SHORT_ROWS,
    Scenario,
    one_forward,
)
from tests.support.configs import drafter, launch_of

ENGINE = pytest.mark.engine


def short_row(row: Scenario) -> Any:
    """No GPU takes FlashInfer for the drafter too by default."""
    name = f"{row.attention} {row.draft_attention}".strip()
    return pytest.param(row, id=name, marks=[pytest.mark.slow] if row.draft_attention == "flashinfer" else [])


@ENGINE
@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(SHORT, id="SGLang's graphs"),
        pytest.param(one_forward(SHORT), id="our graphs", marks=pytest.mark.slow),
        *(short_row(row) for row in SHORT_ROWS),
    ],
)
def test_the_gpu_path_answers_as_the_torch_platform_does(scenario: Scenario) -> None:
    """Two requests; when one is left, its graph has a row of padding."""
    assert differences(scenario, *both(scenario)) == []


def test_the_drafters_backends_are_those_of_the_gpus() -> None:
    chosen = {gpu: replace(launch_of(drafter()), device=GPUS[gpu]).draft_backend for gpu in ("h200", "a100", "b200")}
    rehearsed = {gpu: backends.GPUS[default_backend({}, GPUS[gpu])] for gpu in chosen}
    assert rehearsed == {gpu: (GPUS[gpu].capability, backend) for gpu, backend in chosen.items()}


@ENGINE
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "scenario", (*SCENARIOS, *ONE_FORWARD_SCENARIOS, *BACKEND_SCENARIOS), ids=lambda scenario: scenario.name
)
def test_a_scenario(scenario: Scenario) -> None:
    expected, found = both(scenario)
    met = found.report.get("met", {})
    kernels = [name.startswith("launches: sglang_dflash.") for name in met if name.startswith("launches: ")]
    print("kernels: ours", sum(kernels), "SGLang's", len(kernels) - sum(kernels))
    for kind in ("replays", "eager"):
        print(f"{kind}:", sum(count for name, count in met.items() if name.startswith(f"{kind}: ")))
    assert differences(scenario, expected, found) == []
