"""Prefill and decoding in two rehearsed servers, whose answers are those of one server on the CPU platform."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sglang_dflash.plan.settings import REPLAY_SWITCH as SWITCH
from tests.rehearsal.run import FAILS_AT_ONCE, ROOT
from tests.rehearsal.scenarios import HYBRID, RANDOM_WIDTHS, TURNS
from tests.support.generation import Answer, generate_all
from tests.support.pair_servers import dflash_server, disaggregated, missing_transfer_backend, worker_info
from tests.support.servers import Server

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(missing_transfer_backend() is not None, reason="no transfer backend (docs/deployment.md)"),
]

# Four requests take turns in two rows. Without a backup for retracted requests a decoding server overlaps.
FLAGS = (
    *("--max-running-requests", "2", "--max-total-tokens", "2048", "--max-mamba-cache-size", "32"),
    *("--cuda-graph-bs-decode", "2", "--mamba-radix-cache-strategy", "extra_buffer"),
    *("--disaggregation-decode-retraction-backup", "none", "--skip-server-warmup"),
)
WIDTHS = ("--speculative-adaptive", "--speculative-adaptive-config", RANDOM_WIDTHS["speculative_adaptive_config"])
WINDOW = ("--speculative-draft-window-size", "32")


def rehearsed() -> dict[str, str]:
    """Environment of a rehearsed server."""
    path = (str(ROOT), str(ROOT / "tests/rehearsal/plugin"), os.environ.get("PYTHONPATH"))
    return {
        **FAILS_AT_ONCE,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "TRITON_INTERPRET": "1",
        SWITCH: "1",
    }


def answers(server: Server) -> list[Answer]:
    """Twice, so that the second round hits prefixes where they were computed."""
    inputs: list[list[int]] = TURNS["input_ids"]
    return [answer for _ in range(2) for answer in generate_all(server, inputs, len(inputs), 28)]


@pytest.mark.parametrize("flags", [WINDOW, WIDTHS], ids=["draft window", "widths at random"])
def test_rows_turn_over_under_roles(flags: tuple[str, ...], tmp_path: Path) -> None:
    flags = (*FLAGS, *flags)
    with dflash_server(HYBRID, tmp_path, *flags, **{SWITCH: "1"}) as server:
        expected = answers(server)
    with disaggregated(HYBRID, tmp_path, *flags, **rehearsed()) as servers:
        found = answers(servers.router)
        info, seen = worker_info(servers.decode), servers.decode.get("/server_info").json()["internal_states"][0]
    assert [answer.tokens for answer in found] == [answer.tokens for answer in expected]
    assert info["states"] == "replayed" and any(name.startswith("target") for name in seen["rehearsal"]["replays"])
    if WIDTHS[0] in flags:
        assert len(info["steps_by_width"]) > 2
    else:
        steps = [[answer.meta["spec_verify_ct"] for answer in each] for each in (found, expected)]
        assert steps[0] == steps[1]
