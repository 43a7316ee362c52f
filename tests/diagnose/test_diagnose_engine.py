"""Planted causes on real servers: each is named by the verdict, and a good pair gets none."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from sglang_dflash.cli import app
from sglang_dflash.diagnose import session
from sglang_dflash.diagnose.client import Client
from sglang_dflash.diagnose.questions import TASKS, all_questions
from sglang_dflash.diagnose.report import Report
from sglang_dflash_lab.pairs import drafter_path, target_path
from tests.support.pair_servers import draft_arguments
from tests.support.servers import Server, running

pytestmark = pytest.mark.engine

FLOAT32 = ("--dtype", "float32", "--max-running-requests", "16")
PEERS = Path(__file__).parents[2] / "lab/sglang_dflash_lab/measure/peers"
QUESTIONS = all_questions()


def report(server: Server) -> Report:
    async def ask() -> Report:
        async with Client(server.url) as client:
            return await session.diagnose(client, 64, 600, lambda _: None)

    return asyncio.run(ask())


def verdict(server: Server) -> tuple[int, list[str]]:
    """Exit status and sentences, as a user gets them."""
    ended = CliRunner().invoke(app, ["diagnose", server.url, "--json"])
    assert not ended.exception or isinstance(ended.exception, SystemExit), ended.exception
    return ended.exit_code, json.loads(ended.stdout)["verdict"]


@contextlib.contextmanager
def serving(
    folder: Path, *flags: str, drafter: str | Path = "good", target: Path | None = None, **environment: str
) -> Iterator[Server]:
    model = ("--model-path", str(target or target_path("tiny-hybrid")))
    with running(folder, *model, *draft_arguments("tiny-hybrid", drafter), *flags, **environment) as server:
        yield server


def test_a_good_pair_reaches_its_figures(dflash_hybrid: Server) -> None:
    found = report(dflash_hybrid)
    judged, rows = found.findings, {row["probe"]: row for row in found.as_json()["accept length"]}
    assert judged.server.ours and judged.has_template and judged.server.dtype == "float32"
    assert (judged.server.asked, judged.server.running, judged.server.capped_by) == (16, 16, "--max-running-requests")
    assert judged.stated is not None and not judged.is_low, judged
    assert set(rows) == {
        *(f"chat template: {task}" for task in TASKS),
        *("thinking on", "raw prompts", "temperature 1", "long context", "8 users at once"),
    }
    assert all(1 < row["accept length"] <= 16 and row["width"] == 16 for row in rows.values()), rows
    # Greedy in float32: eight users get the blocks that one user gets.
    one, *_, eight = found.probes
    of_eight = {r.question: r.accepted_drafts for r in eight.requests}
    assert of_eight == {r.question: r.accepted_drafts for r in one.requests if r.question in of_eight}
    # What a missing template costs here is what the verdict would blame on traffic that gets as little.
    assert rows["raw prompts"]["accept length"] < 0.7 * judged.measured
    assert (
        list(found.survival) == sorted(found.survival, reverse=True) and 0 < found.survival[-1] < found.survival[0] <= 1
    )


@pytest.mark.slow
def test_a_good_pair_at_adaptive_widths_gets_no_sentence(tmp_path: Path) -> None:
    with serving(tmp_path, *FLOAT32, "--speculative-adaptive") as server:
        assert [verdict(server) for _ in range(3)] == [(0, [])] * 3


@pytest.mark.slow
def test_requests_without_the_chat_template(tmp_path: Path) -> None:
    with serving(tmp_path, *FLOAT32) as server:
        assert verdict(server) == (0, [])
        for question in QUESTIONS:
            body = {"text": f"{question.messages[0]['content']}\n", "sampling_params": {"temperature": 0}}
            httpx.post(f"{server.url}/generate", json=body, timeout=600).raise_for_status()
        status, told = verdict(server)
    assert status == 1 and "'raw prompts'" in told[0] and "/v1/chat/completions" in told[0], told


@pytest.mark.slow
def test_a_drafter_of_another_target(tmp_path: Path) -> None:
    with serving(tmp_path, *FLOAT32, drafter="mismatched") as server:
        status, told = verdict(server)
    assert status == 1 and "The drafter guesses" in told[0] and "--speculative-draft-model-path" in told[0], told


@pytest.mark.slow
def test_a_block_too_wide_for_eight_users(tmp_path: Path) -> None:
    with serving(tmp_path, *FLOAT32, drafter="weak") as server:
        # The verdict rests on times, and the machine may be busy for one of the two loads.
        asked = (verdict(server) for _ in range(3))
        status, told = next(found for found in asked if found[1])
    assert status == 1 and "too wide for 8 users" in told[0] and "--speculative-adaptive" in told[0], told


@pytest.mark.slow
def test_a_drafter_of_another_revision_and_requests_that_memory_caps(tmp_path: Path) -> None:
    other = tmp_path / "tiny-hybrid" / "drafter-good"
    shutil.copytree(drafter_path("tiny-hybrid", "noisy"), other)
    memory = ("--dtype", "float32", "--max-running-requests", "64", "--max-mamba-cache-size", "36")
    with serving(tmp_path, *memory, drafter=other) as server:
        status, told = verdict(server)
    assert status == 1 and "another revision" in told[0] and "--speculative-draft-model-revision" in told[0], told
    assert "Only 7 of 64 requests" in told[1] and "a larger --max-mamba-cache-size" in told[1], told


@pytest.mark.slow
def test_float16(tmp_path: Path) -> None:
    with serving(tmp_path, "--dtype", "float16", "--max-running-requests", "16") as server:
        status, told = verdict(server)
    assert status == 1 and any("float16" in each and "--dtype bfloat16" in each for each in told), told


@pytest.mark.slow
def test_a_target_without_a_chat_template_under_sglangs_own_worker(tmp_path: Path) -> None:
    target = Path(shutil.copytree(target_path("tiny-hybrid"), tmp_path / "target"))
    (target / "chat_template.jinja").unlink()
    tokenizer = target / "tokenizer_config.json"
    settings = json.loads(tokenizer.read_text())
    del settings["chat_template"]
    tokenizer.write_text(json.dumps(settings))
    path = os.pathsep.join(filter(None, (str(PEERS), os.environ.get("PYTHONPATH"))))
    with serving(tmp_path, *FLOAT32, target=target, PYTHONPATH=path, SGLANG_DFLASH="builtin") as server:
        assert "sglang_dflash" not in server.get("/server_info").json()["internal_states"][0]
        status, told = verdict(server)
    assert status == 1 and "no chat template" in told[0] and "--chat-template" in told[0], told
