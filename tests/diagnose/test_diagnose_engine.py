"""Planted causes on real servers: the verdict names each, and a good pair gets none."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from sglang_dflash.check.cli import app
from sglang_dflash.check.diagnose.client import Client
from sglang_dflash.check.diagnose.probe import QUESTIONS
from sglang_dflash.check.diagnose.verdict import Report, diagnose
from sglang_dflash_lab.pairs import drafter_path, target_path
from tests.support.servers import Server, draft_arguments, running

pytestmark = pytest.mark.engine

FLOAT32 = ("--dtype", "float32", "--max-running-requests", "16")
PEERS = Path(__file__).parents[2] / "lab/sglang_dflash_lab/measure/peers"


def report(server: Server) -> Report:
    async def ask() -> Report:
        async with Client(server.url) as client:
            return await diagnose(client, 64, 600, 600, lambda _: None)

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
    rows = {row["probe"]: row for row in found.rows()}
    assert found.server.worker == "sglang-dflash" and found.probes[0].template and found.server.known == {}
    assert (found.server.requests["asked"], found.server.requests["running"]) == (16, 16)
    assert found.stated is not None and not found.is_low, found.measured
    names = "chat template", "thinking on", "raw prompts", "temperature 1", "long context", "all at once"
    assert tuple(rows) == names
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
def test_a_drafter_of_another_target_is_named_by_the_verdict_and_once_in_the_log(tmp_path: Path) -> None:
    with serving(tmp_path, *FLOAT32, drafter="mismatched") as server:
        status, lines = verdict(server)
        logged = re.findall(r"DFLASH: drafting does not pay: .* Possible cause: (.*?)\. Fix: ", server.log)
    assert status == 1 and names(lines[0], "drafter of another target", "--speculative-draft-model-path"), lines
    assert logged == ["drafter"]


@pytest.mark.slow
def test_a_drafter_of_another_revision_and_requests_limited_by_memory(tmp_path: Path) -> None:
    other = tmp_path / "tiny-hybrid" / "drafter-good"
    shutil.copytree(drafter_path("tiny-hybrid", "weak"), other)
    shutil.copy(drafter_path("tiny-hybrid", "good") / "provenance.json", other)
    memory = ("--dtype", "float32", "--max-running-requests", "64", "--max-mamba-cache-size", "36")
    with serving(tmp_path, *memory, drafter=other) as server:
        status, lines = verdict(server)
    assert status == 1 and "Likely cause: drafter." in lines[0] and "--speculative-draft-model-revision" in lines[0], (
        lines
    )
    assert names(lines[1], "Only 7 of 64 requests", "a larger --max-mamba-cache-size"), lines


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
