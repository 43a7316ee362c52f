"""A rehearsed scenario (``make rehearse`` runs all), two rehearsed servers, and the launches of a step."""

from __future__ import annotations

import operator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.rehearsal.launches import CATCHES_UP, engines, most
from tests.rehearsal.run import both, differences, rehearsed, run
from tests.rehearsal.scenarios import DENSE, HYBRID, RANDOM_WIDTHS, REPLAY, SCENARIOS, TURNS, adjusted, ask
from tests.support.generation import Answer, counted, generate_all
from tests.support.servers import Server, dflash_server, disaggregated, missing_transfer_backend, worker_info

# Four requests take turns in two rows. Without a backup for retracted requests a decoding server overlaps.
FLAGS = (
    *("--max-running-requests", "2", "--max-total-tokens", "2048", "--max-mamba-cache-size", "32"),
    *("--cuda-graph-bs-decode", "2", "--mamba-radix-cache-strategy", "extra_buffer"),
    *("--disaggregation-decode-retraction-backup", "none", "--skip-server-warmup"),
)
WIDTHS = ("--speculative-adaptive", "--speculative-adaptive-config", RANDOM_WIDTHS["speculative_adaptive_config"])
WINDOW = ("--speculative-draft-window-size", "32")


@pytest.mark.engine
def test_the_gpu_path_answers_as_the_torch_platform_does() -> None:
    """The first scenario with two requests; when one is left, its graph has a row of padding."""
    whole = SCENARIOS[0]
    scenario = replace(
        whole,
        requests=(adjusted(ask(DENSE, 2, 4, growth=8, cut=24)),),
        met=("replays: target 2", "replays: drafter 2", *(met for met in whole.met if met.startswith("launches"))),
        graphs=(2,),
        options={"max_running_requests": 2},
    )
    assert differences(scenario, *both(scenario)) == []


def answers(server: Server) -> list[Answer]:
    """Ask twice, so that the second round hits prefixes where they were computed."""
    inputs: list[list[int]] = TURNS["input_ids"]
    return [answer for _ in range(2) for answer in generate_all(server, inputs, len(inputs), 28)]


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(missing_transfer_backend() is not None, reason="no transfer backend (docs/deployment.md)")
@pytest.mark.parametrize("flags", [WINDOW, WIDTHS], ids=["draft window", "widths at random"])
def test_rows_turn_over_with_prefill_and_decoding_in_two_servers(flags: tuple[str, ...], tmp_path: Path) -> None:
    flags = (*FLAGS, *flags)
    with dflash_server(HYBRID, tmp_path, *flags, **REPLAY) as server:
        expected = answers(server)
    with disaggregated(HYBRID, tmp_path, *flags, **rehearsed(), **REPLAY) as servers:
        found = answers(servers.router)
        info, seen = worker_info(servers.decode), servers.decode.get("/server_info").json()["internal_states"][0]
    assert [answer.tokens for answer in found] == [answer.tokens for answer in expected]
    assert info["states"] == "replayed" and any(name.startswith("replays: target") for name in seen["rehearsal"]["met"])
    if WIDTHS[0] in flags:
        assert len(info["steps_by_width"]) > 2
    else:
        assert counted(found) == counted(expected)


# Graph replays and launches outside of graphs, the most of a step of each kind; docs/results/rehearsal.md has all. At
# adaptive widths 3 of them pass plainly decoded tokens to the drafter's graph.
LAUNCHES = {
    "hybrid, replayed": {"greedy, width 8": (2, 10), "sampled, width 8": (2, 16)},
    "hybrid, kept": {"greedy, width 8": (2, 14)},
    "hybrid, adaptive": {"greedy, width 1": (1, 10), **{f"greedy, width {width}": (2, 16) for width in (2, 4, 8)}},
    "dense": {"greedy, width 8": (2, 6)},
    "dense, draft window": {"greedy, width 8": (2, 7)},
}
# More of a step that injects before it drafts: tokens that the graph does not take. Arrivals decide which steps do.
BEFORE = 7


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("engine", LAUNCHES)
def test_a_step_launches_no_more_than_before(engine: str) -> None:
    outcome, expected = run(engines()[engine], rehearse=True), dict(LAUNCHES[engine])
    assert not outcome.error, outcome.error
    expected |= {f"{kind}{CATCHES_UP}": (graphs, outside + BEFORE) for kind, (graphs, outside) in expected.items()}
    found = {kind: counts[:2] for kind, counts in most(outcome.report["steps"]).items()}
    more = {kind: counts for kind, counts in found.items() if any(map(operator.gt, counts, expected[kind]))}
    assert not more, f"more than {expected}"
