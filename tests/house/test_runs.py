"""An interrupted run of tests leaves no process."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
SGLANG = """
import time
from tests.support.servers import dflash_server

def test_a_server(tmp_path):
    with dflash_server("tiny-dense", tmp_path):
        time.sleep(600)
"""


def words(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


@pytest.mark.engine
@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_an_interrupted_run_leaves_no_process(tmp_path: Path, workers: int) -> None:
    """As Ctrl-C does, SIGINT reaches pytest and its workers while a server starts."""
    (tmp_path / "test_it.py").write_text(SGLANG)
    given = ("-c", str(ROOT / "pyproject.toml"), f"--rootdir={ROOT}", "-p", "tests.conftest", "-p", "no:cacheprovider")
    command = [sys.executable, "-m", "pytest", *given, "-n", str(workers), "--dist", "loadgroup"]
    started = subprocess.Popen([*command, str(tmp_path / "test_it.py")], cwd=ROOT, stdout=subprocess.DEVNULL)
    pytest_itself, deadline = psutil.Process(started.pid), time.monotonic() + 120
    while not any("scheduler" in words(each) for each in pytest_itself.children(recursive=True)):
        assert time.monotonic() < deadline and started.poll() is None
        time.sleep(0.5)
    family = [pytest_itself, *pytest_itself.children(recursive=True)]
    for each in family[: 1 + workers]:
        each.send_signal(signal.SIGINT)
    _, alive = psutil.wait_procs(family, timeout=30)
    assert [each.cmdline() for each in alive] == []
