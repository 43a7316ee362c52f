"""Rehearsed scenarios against the CPU platform, a short one in ``make test``, and the launches of a step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.rehearsal.launches import CATCHES_UP
from tests.rehearsal.run import both, differences, run
from tests.rehearsal.scenarios import (
    COUNTED,
    DENSE,
    ONE_FORWARD_SCENARIOS,
    SCENARIOS,
    Scenario,
    adjusted,
    ask,
    one_forward,
)

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


# Graph replays and launches outside of graphs, the most of a step of each kind; docs/results/rehearsal.md has all. At
# adaptive widths 3 of them pass plainly decoded tokens to the drafter's graph.
LAUNCHES = {
    "hybrid, replayed": {"greedy, width 8": (2, 11), "sampled, width 8": (2, 16)},
    "hybrid, kept": {"greedy, width 8": (2, 15)},
    "hybrid, adaptive": {"greedy, width 1": (1, 11), **{f"greedy, width {width}": (2, 17) for width in (2, 4, 8)}},
    "dense": {"greedy, width 8": (2, 7)},
    "dense, draft window": {"greedy, width 8": (2, 8)},
}
# One copy feeds the drafter's own graph; before, six fed that of SGLang's runner, in a forward.
LAUNCHES |= {
    f"{name}, one forward": {kind: (replays, launches + (replays == 2)) for kind, (replays, launches) in kinds.items()}
    for name, kinds in LAUNCHES.items()
    if "kept" not in name
}
OF_TARGETS_ATTENTION = 9  # SGLang's Triton backend prepares a verify; the drafter's attention needs nothing
# More of a step that injects before it drafts: tokens that the graph does not take. Arrivals decide which steps do.
BEFORE = 7
# More of a step for each tail that it copies, once per cached prefix.
TAIL = 5
# More of a sampled step whose requests have changed: the drafter's graph reads how the target draws.
NOISE = 6


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("engine", LAUNCHES)
def test_a_step_launches_no_more_than_before(engine: str) -> None:
    outcome, expected = run(COUNTED[engine], rehearse=True), LAUNCHES[engine]
    assert not outcome.error, outcome.error
    for step in outcome.report["steps"]:
        before = f"in {step['forwards']} forwards:"
        print(step["kind"], step["replays"], *step["launches"], before, *step["in_forwards"], sep="\n  ")
        replays, outside = expected[step["kind"].removesuffix(CATCHES_UP)]
        outside += BEFORE * step["kind"].endswith(CATCHES_UP)
        outside += TAIL * sum("copy_all_layer_kv_cache" in launch for launch in step["launches"])
        outside += NOISE * any(launch.endswith(" share") for launch in step["launches"])
        assert step["replays"] <= replays and len(step["launches"]) <= outside, step
        assert "one forward" not in engine or step["forwards"] == 1, step
        if engine.startswith("dense"):
            copies = "cuda_graph_buffer_registry", "_copy_replay_inputs"
            metadata = [launch for launch in step["in_forwards"] if not any(copy in launch for copy in copies)]
            assert len(metadata) <= OF_TARGETS_ATTENTION, metadata
