"""The GPU kit: its runner, records and traces; and drift, which names what a release lacks."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.house.contract import Symbol
from tools import drift
from tools.gpu import __main__ as runner
from tools.gpu import records
from tools.gpu.run import Run

# Like a server, the child of the first step has its own session and would outlive a killed parent.
HANG = """
import signal, subprocess, sys, time
from pathlib import Path
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
Path(sys.argv[1]).write_text(str(child.pid))
try:
    time.sleep(600)
finally:
    child.kill()
"""
PROGRAMS = {
    "machine": HANG,
    "kernels": "raise SystemExit(1)",
    "replay": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "card": "raise SystemExit(3)",
    "nosync": "print('done')",
}


def run(folder: Path, *steps: str, minutes: float = 60) -> tuple[bool, list[str]]:
    """Return whether all steps went well, and each step's status."""
    command = [sys.executable, "-c"]
    good = runner.run_steps(steps, folder, lambda step: [*command, PROGRAMS[step], str(folder / "child")], minutes)
    return good, [row["status"] for row in records.read(folder, records.STATUS)]


def test_every_step_runs_and_ends_with_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(runner.STEPS, "machine", ("", 0.5))
    assert run(tmp_path, *PROGRAMS) == (False, ["out of time", "failed", "failed", "skipped", "passed"])
    assert (tmp_path / "nosync.log").read_text() == "done\n"
    child, deadline = int((tmp_path / "child").read_text()), time.monotonic() + 30
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the step's child is still running"
        time.sleep(0.1)
    assert runner.left(tmp_path) == [step for step in runner.STEPS if step not in ("card", "nosync")]


def test_a_failed_measurement_is_recorded_and_repeated_by_the_next_call(tmp_path: Path) -> None:
    step = Run("cuda", tmp_path, "nosync")

    def broken() -> dict[str, object]:
        raise RuntimeError("no server")

    assert not step.measure_each([({"pair": "a"}, broken), ({"pair": "b"}, lambda: {"sum": 1})])
    failed, passed = records.read(tmp_path, "nosync")
    assert failed["error"].startswith(__file__) and failed["error"].endswith("RuntimeError: no server")
    assert "error" not in passed
    assert step.measure({"pair": "a"}, lambda: {"sum": 1})
    assert step.measure({"pair": "a"}, broken)  # finished: not measured again
    assert len(records.read(tmp_path, "nosync")) == 3


def test_missing_names_and_parameters_are_found(tmp_path: Path) -> None:
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang/__init__.py").touch()
    (tmp_path / "sglang/spec.py").write_text("def verify(block, width=4): ...\n")
    (tmp_path / "sglang/broken.py").write_text("raise RuntimeError('no device')\n")
    symbols = [
        Symbol("sglang.spec.verify", ("block",)),
        Symbol("sglang.spec.verify", ("block", "rank")),
        Symbol("sglang.spec.gone"),
        Symbol("sglang.broken.name"),
    ]
    assert drift.install(str(tmp_path)) == tmp_path  # a checkout's folder is not downloaded
    assert drift.problems(symbols[:1], tmp_path) == {}
    assert drift.problems(symbols[1:], tmp_path) == {
        "sglang.spec.verify": "parameters ['rank'] not in (block, width)",
        "sglang.spec.gone": "not found (module 'sglang.spec' has no attribute 'gone')",
        "sglang.broken.name": "cannot be imported (RuntimeError: no device)",
    }
