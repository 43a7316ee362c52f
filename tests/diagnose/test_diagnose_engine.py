"""On real servers a good pair reaches its figures, and a drafter of another target is named."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sglang_dflash.check.cli import app
from sglang_dflash.check.diagnose.client import Client
from sglang_dflash.check.diagnose.verdict import Diagnosis, diagnose
from tests.diagnose.test_command import PROBES
from tests.support.servers import Server, dflash_server

pytestmark = pytest.mark.engine

FLOAT32 = ("--dtype", "float32", "--max-running-requests", "16")


def report(server: Server) -> Diagnosis:
    async def ask() -> Diagnosis:
        async with Client(server.url) as client:
            return await diagnose(client, 64, 600, 600, lambda _: None)

    return asyncio.run(ask())


def test_a_good_pair_is_healthy(dflash_hybrid: Server) -> None:
    found = report(dflash_hybrid)
    rows = {row["probe"]: row for row in found.as_json()["probes"]}
    assert found.server.worker == "sglang-dflash" and found.probes[0].template and found.server.known == {}
    assert (found.server.requests["asked"], found.server.requests["running"]) == (16, 16)
    assert not found.is_low, found.measured
    assert tuple(rows) == PROBES
    assert all(1 < row["accept length"] <= 16 and row["width"] == 16 for row in rows.values()), rows
    # Greedy in float32: eight users get the blocks of one user.
    accepted = [
        sorted(meta["spec_correct_drafts_histogram"] for _, meta in answers)
        for answers in (found.probes[0].answers[:8], found.probes[-1].answers)
    ]
    assert accepted[0] == accepted[1]
    # Low enough for the verdict to blame a missing template.
    assert rows["raw prompts"]["accept length"] < 0.7 * found.measured
    survival = found.survival
    assert survival == sorted(survival, reverse=True) and 0 < survival[-1] < survival[0] <= 1


@pytest.mark.slow
def test_a_drafter_of_another_target_is_named_by_the_verdict_and_once_in_the_log(tmp_path: Path) -> None:
    with dflash_server("tiny-hybrid", tmp_path, base=FLOAT32, drafter="mismatched") as server:
        ended = CliRunner().invoke(app, ["diagnose", server.url, "--json"])
        logged = re.findall(r"DFLASH: drafting does not pay: .* Possible cause: (.*?)\. Fix: ", server.log)
    [line, *_] = json.loads(ended.stdout)["verdict"]
    assert ended.exit_code == 1 and "drafter of another target" in line and "--speculative-draft-model-path" in line
    assert logged == ["drafter"]
