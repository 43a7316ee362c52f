"""``make gpu``'s runner: a step that fails, hangs or is killed is recorded, and the next one still runs."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest

from tools.gpu import records, runner

# Like a server, the child of "hang" has a session of its own and outlives a killed parent.
STEPS = {
    "hang": "import subprocess, sys, time; from pathlib import Path\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
    "Path(sys.argv[2], 'child').write_text(str(child.pid)); time.sleep(600)",
    "bad": "raise SystemExit(1)",
    "crash": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "skipped": "raise SystemExit(3)",
    "good": "print('done')",
}


def run(folder: Path, *steps: str, minutes: float = 1) -> tuple[bool, list[str]]:
    """Whether all went well, and each step's status."""
    package = folder / "path/fake_steps"
    package.mkdir(parents=True)
    for name, text in STEPS.items():
        (package / f"{name}.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(package.parent)}
    good = runner.run(runner.Plan(steps, minutes), folder, environment, "fake_steps")
    return good, [row["status"] for row in records.read(folder, runner.LOG)]


def test_every_step_runs_and_ends_with_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(runner.BUDGETS, "hang", 3)
    assert run(tmp_path, *STEPS) == (False, ["out of time", "failed", "failed", "skipped", "passed"])
    assert (tmp_path / "good.log").read_text() == "done\n"
    child, deadline = int((tmp_path / "child").read_text()), time.monotonic() + 30
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the step's child lives on"
        time.sleep(0.1)


def test_a_step_without_time_left_is_not_started(tmp_path: Path) -> None:
    assert run(tmp_path, "good", minutes=0) == (False, ["not started"])


def test_what_has_passed_is_not_left(tmp_path: Path) -> None:
    run(tmp_path, "good", "bad", "skipped")
    assert runner.left(tmp_path, ("good", "bad", "skipped", "hang")) == ("bad", "hang")
