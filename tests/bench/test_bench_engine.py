"""The commands from end to end on real servers: SGLang's load generator, equal answers, the report."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest
from typer.testing import CliRunner

from sglang_dflash.check.cli import app
from sglang_dflash_lab.bench import results
from sglang_dflash_lab.bench.arms import AR
from sglang_dflash_lab.bench.figures import Summary
from sglang_dflash_lab.pairs import target_path
from tests.bench.test_session import ARMS_OF_THE_TABLE, LAB
from tests.support.generation import flush
from tests.support.servers import Server

pytestmark = [pytest.mark.engine, pytest.mark.slow]

MODEL = str(target_path("tiny-hybrid"))
PEERS = LAB / "sglang_dflash_lab/measure/peers"  # for SGLang's worker on a CPU


def bench(out: Path, *arguments: str) -> str:
    outcome = CliRunner().invoke(app, ["bench", *arguments, f"--out={out}"])
    assert outcome.exit_code == 0, outcome.output
    return outcome.output


def test_bench_measures_two_servers_and_finds_their_answers_equal(
    plain_hybrid: Server, dflash_hybrid: Server, tmp_path: Path
) -> None:
    servers = [f"--base-url=ar={plain_hybrid.url}", f"--base-url=dflash:16={dflash_hybrid.url}"]
    size = ["--tasks=json,chat", "--concurrency=2", "--num-prompts=3", "--repeats=1", "--max-tokens=48"]
    output = bench(tmp_path, "--pair=tiny-hybrid", "--modes=ar,dflash:16", *servers, *size)
    assert len(re.findall("3 / 3", output)) == 2
    plain, dflash = (
        [run for run in results.read(tmp_path, "run") if run["mode"] == mode] for mode in ("ar", "dflash:16")
    )
    for ours, theirs in zip(dflash, plain, strict=True):
        assert ours["generated_texts"] == theirs["generated_texts"] and all(ours["generated_texts"])
        assert ours["total_output_tokens"] == theirs["total_output_tokens"]
        assert (ours["concurrency"], ours["repeat"]) == (theirs["concurrency"], 0) == (2, 0)
        assert 1 < ours["accept_length"] <= 16 and theirs["accept_length"] is None
        assert set(ours["worker"]["steps_by_width"]) == {"16"} and ours["worker"]["steps_by_width"]["16"] > 0
    assert CliRunner().invoke(app, ["report", str(tmp_path)]).exit_code == 0
    assert (tmp_path / "report.html").exists()


def test_both_accept_lengths_are_the_servers(dflash_hybrid: Server, tmp_path: Path) -> None:
    """The run's, without each answer's first token; the cards', of every answer."""
    size = ["--tasks=math", "--concurrency=4", "--num-prompts=8", "--repeats=1", "--max-tokens=48"]
    output = bench(tmp_path, "--modes=dflash:16", f"--base-url={dflash_hybrid.url}", *size)
    [run] = results.read(tmp_path, "run")
    asked = [json.loads(row)["conversations"][0] for row in (tmp_path / "prompts-math.jsonl").read_text().splitlines()]
    body = {"text": [each["content"] for each in asked], "sampling_params": {"temperature": 0, "max_new_tokens": 48}}
    flush(dflash_hybrid)
    metas = [answer["meta_info"] for answer in dflash_hybrid.post("/generate", body).json()]
    of_answers = [meta["completion_tokens"] / meta["spec_verify_ct"] for meta in metas]
    assert sorted(run["accept_lengths"]) == pytest.approx(sorted(of_answers)) and len(set(of_answers)) > 1
    state = dflash_hybrid.get("/server_info").json()["internal_states"][0]
    assert run["accept_length"] == pytest.approx(state["avg_spec_accept_length"])
    row = Summary(tmp_path).rows["dflash:16", "math", 4]
    assert (row.card_accept, row.accept) == (pytest.approx(fmean(of_answers)), run["accept_length"])
    assert f"{row.card_accept:.2f}" in output


@pytest.mark.timeout(1200)
def test_every_arm_of_the_table_starts_and_gives_plain_decodings_answers(tmp_path: Path) -> None:
    arms = [kind if kind == AR else f"{kind}:8" for kind in ARMS_OF_THE_TABLE]
    arms[arms.index("builtin:8")] += f"+PYTHONPATH={PEERS}"
    size = ["--tasks=questions", "--concurrency=2", "--num-prompts=2", "--repeats=1", "--max-tokens=32"]
    bench(tmp_path, "--pair=tiny-dense", f"--modes={','.join(arms)}", *size, "--one-at-a-time")
    texts = {run["mode"]: run["generated_texts"] for run in results.read(tmp_path, "run")}
    assert list(texts) == arms and all(text == texts[AR] for text in texts.values())


def test_the_demo_ends_with_its_result() -> None:
    command = [sys.executable, "-m", "sglang_dflash_lab.bench.demo"]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert "The answers are identical." in printed
    result = r"dflash:16 over plain decoding: \d+\.\dx for 1 user, \d+\.\dx for 8, 64 of 64 answers identical"
    assert re.fullmatch(result, printed.splitlines()[-1])
