"""Rehearsed scenarios against the CPU platform, and a short one in ``make test``."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.rehearsal.run import both, differences
from tests.rehearsal.scenarios import DENSE, ONE_FORWARD_SCENARIOS, SCENARIOS, Scenario, adjusted, ask, one_forward

pytestmark = pytest.mark.engine


OUR_GRAPHS = pytest.param(one_forward(SCENARIOS[0]), marks=pytest.mark.slow)


@pytest.mark.parametrize("whole", [SCENARIOS[0], OUR_GRAPHS], ids=["SGLang's graphs", "our graphs"])
def test_the_gpu_path_answers_as_the_torch_platform_does(whole: Scenario) -> None:
    """The first scenario with two requests; when one is left, its graph has a row of padding."""
    scenario = replace(
        whole,
        requests=(adjusted(ask(DENSE, 2, 4, growth=4, cut=28)),),
        met=("replays: target 2", "replays: drafter 2", *(met for met in whole.met if "replays" not in met)),
        width=4,
        graphs=(2,),
        options={"max_running_requests": 2},
    )
    assert differences(scenario, *both(scenario)) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scenario", (*SCENARIOS, *ONE_FORWARD_SCENARIOS), ids=lambda scenario: scenario.name)
def test_a_scenario(scenario: Scenario) -> None:
    expected, found = both(scenario)
    met = found.report.get("met", {})
    kernels = [name.startswith("launches: sglang_dflash.") for name in met if name.startswith("launches: ")]
    print("kernels: ours", sum(kernels), "SGLang's", len(kernels) - sum(kernels))
    for kind in ("replays", "eager"):
        print(f"{kind}:", sum(count for name, count in met.items() if name.startswith(f"{kind}: ")))
    assert differences(scenario, expected, found) == []
