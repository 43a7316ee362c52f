"""One scenario in every test run (``make rehearse`` runs all), and prefill and decoding in two rehearsed servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rehearsal.run import both, differences, rehearsed
from tests.rehearsal.scenarios import HYBRID, RANDOM_WIDTHS, REPLAY, SCENARIOS, TURNS
from tests.support.generation import Answer, counted, generate_all
from tests.support.pair_servers import dflash_server, disaggregated, missing_transfer_backend, worker_info
from tests.support.servers import Server

# Four requests take turns in two rows. Without a backup for retracted requests a decoding server overlaps.
FLAGS = (
    *("--max-running-requests", "2", "--max-total-tokens", "2048", "--max-mamba-cache-size", "32"),
    *("--cuda-graph-bs-decode", "2", "--mamba-radix-cache-strategy", "extra_buffer"),
    *("--disaggregation-decode-retraction-backup", "none", "--skip-server-warmup"),
)
WIDTHS = ("--speculative-adaptive", "--speculative-adaptive-config", RANDOM_WIDTHS["speculative_adaptive_config"])
WINDOW = ("--speculative-draft-window-size", "32")


def test_the_gpu_path_answers_as_the_torch_platform_does() -> None:
    scenario = SCENARIOS[0]
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
