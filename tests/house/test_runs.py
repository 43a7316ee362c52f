"""Runs of tests: a shared server that ends is named, an interrupted run leaves no process, no proof is repeated."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.serving.matrix import Record
from tools import proof
from tools.proof import Run, runs

ROOT = Path(__file__).parents[2]
HTTP = """
import os, signal, sys, pytest
from sglang_dflash_lab.bench.server import free_port
from tests.support.servers import started

@pytest.fixture(scope="module")
def server(tmp_path_factory):
    port = free_port()
    command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]
    with started(tmp_path_factory.mktemp("shared"), port, command, "/") as server:
        yield server

def test_one(server):
    os.kill(server.process.pid, signal.SIGTERM)
    server.process.wait()

def test_another(server):
    server.get("/")
"""
SGLANG = """
import time
from tests.support.servers import dflash_server

def test_a_server(tmp_path):
    with dflash_server("tiny-dense", tmp_path):
        time.sleep(600)
"""


def run(folder: Path, text: str, *options: str) -> subprocess.Popen[str]:
    """Start pytest on a file with this text, as `make` does in a terminal: a shell's background job ignores SIGINT."""
    (folder / "test_it.py").write_text(text)
    given = ("-c", str(ROOT / "pyproject.toml"), f"--rootdir={ROOT}", "-p", "tests.conftest", "-p", "no:cacheprovider")
    command = ["env", "--default-signal=INT", sys.executable, "-m", "pytest", *given, *options, f"{folder}/test_it.py"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.engine
def test_a_shared_server_that_ended_is_named_with_its_log(tmp_path: Path) -> None:
    output, _ = run(tmp_path, HTTP, "-n", "0").communicate(timeout=120)
    assert "1 failed, 1 passed" in output
    _, _, failure = output.partition("test_another")
    assert "the server's exit code: -15; its log:" in failure and '"GET / HTTP/1.1" 200' in failure


def words(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


@pytest.mark.engine
@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_an_interrupted_run_leaves_no_process(tmp_path: Path, workers: int) -> None:
    """As Ctrl-C does, SIGINT reaches pytest and its workers while a server starts."""
    started = run(tmp_path, SGLANG, "-n", str(workers), "--dist", "loadgroup")
    pytest_itself, deadline = psutil.Process(started.pid), time.monotonic() + 120
    while not any("scheduler" in words(each) for each in pytest_itself.children(recursive=True)):
        assert time.monotonic() < deadline and started.poll() is None
        time.sleep(0.5)
    family = [pytest_itself, *pytest_itself.children(recursive=True)]
    for each in family[: 1 + workers]:
        each.send_signal(signal.SIGINT)
    _, alive = psutil.wait_procs(family, timeout=30)
    assert [each.cmdline() for each in alive] == []


def test_a_run_is_repeated_after_a_failure_and_once_a_file_that_it_depends_on_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = ("", 0, 0)
    monkeypatch.setattr(proof, "CACHE", tmp_path)
    monkeypatch.setattr(Record, "key", property(lambda _: now[0]))
    monkeypatch.setattr(proof, "runs", lambda: [Run("a", f"echo ran >> {tmp_path}/ran; exit {now[1]}")])
    for now in (("before", 3, 1), ("before", 0, 2), ("before", 0, 2), ("after", 0, 3)):
        with pytest.raises(SystemExit) as ended:
            proof.main(None)
        assert ended.value.code == bool(now[1]) and (tmp_path / "ran").read_text() == "ran\n" * now[2]


def test_every_make_target_that_tests_is_a_run() -> None:
    makefile = (ROOT / "Makefile").read_text()
    commands = " ".join(run.command for run in runs())
    targets = makefile.partition(".PHONY:")[2].partition("\n")[0].split()
    tests = {target for target in targets if target.startswith("test")} - {"test-gpu"}
    for target in tests | {"soak", "fuzz", "mutants", "rehearse"}:
        assert f"make {target}" in commands, target
    names = [run.name for run in runs()]
    assert len(names) == len(set(names))
