"""The commands from end to end on real servers: SGLang's load generator, equal answers, the report."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sglang_dflash.check.cli import app
from sglang_dflash_lab.bench import results
from sglang_dflash_lab.pairs import target_path
from tests.support.servers import Server

pytestmark = [pytest.mark.engine, pytest.mark.slow]

MODEL = str(target_path("tiny-hybrid"))


def test_bench_measures_two_servers_and_finds_their_answers_equal(
    plain_hybrid: Server, dflash_hybrid: Server, tmp_path: Path
) -> None:
    servers = [f"--base-url=ar={plain_hybrid.url}", f"--base-url=dflash:16={dflash_hybrid.url}"]
    size = ["--tasks=json,chat", "--concurrency=2", "--num-prompts=3", "--repeats=1", "--max-tokens=48"]
    command = ["bench", "--pair=tiny-hybrid", "--modes=ar,dflash:16", *servers, *size, f"--out={tmp_path}"]
    outcome = CliRunner().invoke(app, command)
    assert outcome.exit_code == 0, outcome.output
    assert len(re.findall("3 / 3", outcome.output)) == 2
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


def test_sampled_arms_write_the_same_text_in_more_steps_without_the_targets_noise(tmp_path: Path) -> None:
    size = ["--tasks=questions", "--concurrency=4", "--num-prompts=12", "--repeats=1", "--max-tokens=64"]
    command = ["bench", "--pair=tiny-forks", "--modes=dflash:16,best:16", "--temperature=0.7", *size]
    outcome = CliRunner().invoke(app, [*command, f"--out={tmp_path}"])
    assert outcome.exit_code == 0, outcome.output
    with_noise, best = results.read(tmp_path, "run")
    assert with_noise["generated_texts"] == best["generated_texts"]
    assert with_noise["accept_length"] > 1.1 * best["accept_length"]


def test_the_demo_ends_with_its_result() -> None:
    command = [sys.executable, "-m", "sglang_dflash_lab.bench.demo"]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert "The answers are identical." in printed
    result = r"dflash:16 over plain decoding: \d+\.\dx for 1 user, \d+\.\dx for 8, 64 of 64 answers identical"
    assert re.fullmatch(result, printed.splitlines()[-1])
