"""Planted causes on real servers: the verdict names each, and a good pair gets none."""

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
from sglang_dflash.diagnose.client import Client
from sglang_dflash.diagnose.probe import PROMPTS, QUESTIONS
from sglang_dflash.diagnose.verdict import Report, diagnose
from sglang_dflash_lab.pairs import drafter_path, target_path
from tests.support.pair_servers import draft_arguments
from tests.support.servers import Server, running

pytestmark = pytest.mark.engine

FLOAT32 = ("--dtype", "float32", "--max-running-requests", "16")
PEERS = Path(__file__).parents[2] / "lab/sglang_dflash_lab/measure/peers"


def report(server: Server) -> Report:
    async def ask() -> Report:
        async with Client(server.url) as client:
            return await diagnose(client, 64, 600, lambda _: None)

    return asyncio.run(ask())


def verdict(server: Server) -> tuple[int, list[str]]:
    """Exit status and sentences of the command."""
    ended = CliRunner().invoke(app, ["diagnose", server.url, "--json"])
    assert not ended.exception or isinstance(ended.exception, SystemExit), ended.exception
    return ended.exit_code, json.loads(ended.stdout)["verdict"]


def names(sentence: str, *parts: str) -> bool:
    return all(part in sentence for part in parts)


@contextlib.contextmanager
def serving(
    folder: Path, *flags: str, drafter: str | Path = "good", target: Path | None = None, **environment: str
) -> Iterator[Server]:
    model = ("--model-path", str(target or target_path("tiny-hybrid")))
    with running(folder, *model, *draft_arguments("tiny-hybrid", drafter), *flags, **environment) as server:
        yield server


def test_a_good_pair_reaches_its_figures(dflash_hybrid: Server) -> None:
    found = report(dflash_hybrid)
    judged, rows = found.findings, {row["probe"]: row for row in found.as_json()["probes"]}
    assert judged.has_template and judged.server.worker == "sglang-dflash" and judged.server.dtype == "float32"
    assert (judged.server.max_running_requests, judged.server.concurrent_requests, judged.server.limited_by) == (
        16,
        16,
        "--max-running-requests",
    )
    assert judged.stated is not None and not judged.is_low, judged
    assert set(rows) == {
        *(f"chat template: {task}" for task in PROMPTS),
        *("thinking on", "raw prompts", "temperature 1", "long context", "8 users at once"),
    }
    assert all(1 < row["accept length"] <= 16 and row["width"] == 16 for row in rows.values()), rows
    # Greedy in float32: eight users get the blocks of one user.
    one, *_, eight = found.probes
    accepted = [
        sorted(answer.generation.meta["spec_correct_drafts_histogram"] for answer in answers)
        for answers in (one.answers[:8], eight.answers)
    ]
    assert accepted[0] == accepted[1]
    # Low enough for the verdict to blame a missing template.
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
        for _, prompt in QUESTIONS:
            body = {"text": f"{prompt}\n", "sampling_params": {"temperature": 0}}
            httpx.post(f"{server.url}/generate", json=body, timeout=600).raise_for_status()
        status, lines = verdict(server)
    assert status == 1 and names(lines[0], "'raw prompts'", "/v1/chat/completions"), lines


@pytest.mark.slow
def test_a_drafter_of_another_target(tmp_path: Path) -> None:
    with serving(tmp_path, *FLOAT32, drafter="mismatched") as server:
        status, lines = verdict(server)
    assert status == 1 and "drafter of another target" in lines[0] and "--speculative-draft-model-path" in lines[0], (
        lines
    )


@pytest.mark.slow
def test_a_block_too_large_for_eight_users(tmp_path: Path) -> None:
    with serving(tmp_path, *FLOAT32, drafter="weak") as server:
        # The verdict depends on times, and the machine may be busy during one of the two loads.
        verdicts = (verdict(server) for _ in range(3))
        status, lines = next(found for found in verdicts if found[1])
    assert status == 1 and "too large for 8 concurrent users" in lines[0] and "--speculative-adaptive" in lines[0], (
        lines
    )


@pytest.mark.slow
def test_a_drafter_of_another_revision_and_requests_limited_by_memory(tmp_path: Path) -> None:
    other = tmp_path / "tiny-hybrid" / "drafter-good"
    shutil.copytree(drafter_path("tiny-hybrid", "noisy"), other)
    memory = ("--dtype", "float32", "--max-running-requests", "64", "--max-mamba-cache-size", "36")
    with serving(tmp_path, *memory, drafter=other) as server:
        status, lines = verdict(server)
    assert status == 1 and "Likely cause: drafter." in lines[0] and "--speculative-draft-model-revision" in lines[0], (
        lines
    )
    assert names(lines[1], "Only 7 of 64 requests", "a larger --max-mamba-cache-size"), lines


@pytest.mark.slow
def test_float16(tmp_path: Path) -> None:
    with serving(tmp_path, "--dtype", "float16", "--max-running-requests", "16") as server:
        status, lines = verdict(server)
    assert status == 1 and any(names(line, "float16", "--dtype bfloat16") for line in lines), lines


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
        status, lines = verdict(server)
    assert status == 1 and names(lines[0], "no chat template", "--chat-template"), lines
