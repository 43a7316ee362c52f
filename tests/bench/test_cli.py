"""The commands from end to end, against servers with canned answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sglang_dflash.cli import app
from sglang_dflash_lab.bench import results
from sglang_dflash_lab.bench.report import PAGE
from tests.bench.fake_server import FakeServer, serve


@pytest.fixture
def servers() -> Iterator[list[str]]:
    """Options that name a running server for ``ar`` and one for ``dflash:16``."""
    with serve(FakeServer()) as plain, serve(FakeServer(block=16)) as dflash:
        yield ["--base-url", f"ar={plain.url}", "--base-url", f"dflash:16={dflash.url}"]


def test_a_benchmark_prints_its_tables_and_leaves_a_report(servers: list[str], tmp_path: Path):
    options = [
        "--modes",
        "ar,dflash:16",
        "--tasks",
        "json",
        "--concurrency",
        "2",
        "--num-prompts",
        "3",
        "--repeats",
        "1",
    ]
    outcome = CliRunner().invoke(app, ["bench", *servers, *options, "--out", str(tmp_path)])
    assert outcome.exit_code == 0, outcome.output
    assert "Throughput and speed-up" in outcome.output
    assert "Answers" in outcome.output
    assert len(results.read_finished(tmp_path).runs) == 2
    outcome = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert outcome.exit_code == 0, outcome.output
    assert (tmp_path / PAGE).exists()
