"""``make gpu``'s runner: a step that fails, hangs or is killed is recorded, and the next one runs all the same."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest

from tools.gpu import records, runner
from tools.gpu.runner import Plan

STEPS = {
    "good": "print('done')",
    "bad": "raise SystemExit(1)",
    "crash": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "skipped": "raise SystemExit(3)",
    # As a server does: a session of its own, which outlives a step that is killed.
    "hang": "import subprocess, sys, time; from pathlib import Path\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
    "Path(sys.argv[2], 'child').write_text(str(child.pid)); time.sleep(600)",
}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """One in which ``fake_steps`` holds the steps above."""
    package = tmp_path / "path/fake_steps"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    for name, text in STEPS.items():
        (package / f"{name}.py").write_text(text)
    return {**os.environ, "PYTHONPATH": str(package.parent)}


def statuses(out: Path) -> list[tuple[str, str]]:
    return [(row["step"], row["status"]) for row in records.read(out, runner.LOG)]


def test_every_step_runs_whatever_became_of_the_one_before(tmp_path: Path, environment: dict[str, str]) -> None:
    steps = ("bad", "crash", "skipped", "good")
    assert not runner.run(Plan(steps, minutes=1), tmp_path / "out", environment, "fake_steps")
    assert statuses(tmp_path / "out") == [
        ("bad", "failed"), ("crash", "failed"), ("skipped", "skipped"), ("good", "passed")
    ]  # fmt: skip
    assert (tmp_path / "out/good.log").read_text() == "done\n"


def test_a_run_without_a_failure_is_good(tmp_path: Path, environment: dict[str, str]) -> None:
    assert runner.run(Plan(("good", "skipped"), minutes=1), tmp_path, environment, "fake_steps")


def test_a_step_out_of_time_ends_with_what_it_started(
    tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(runner.BUDGETS, "hang", 3)
    assert not runner.run(Plan(("hang", "good"), minutes=1), tmp_path, environment, "fake_steps")
    assert statuses(tmp_path) == [("hang", "out of time"), ("good", "passed")]
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 30
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the step's child lives on"
        time.sleep(0.1)


def test_what_no_time_is_left_for_is_not_started(tmp_path: Path, environment: dict[str, str]) -> None:
    assert not runner.run(Plan(("good",), minutes=0), tmp_path, environment, "fake_steps")
    assert statuses(tmp_path) == [("good", "not started")]


def test_steps_run_in_the_order_of_use() -> None:
    assert runner.chosen("steptimes,kernels") == ("kernels", "steptimes")
    assert runner.chosen("") == runner.chosen("all") == tuple(runner.BUDGETS)
    with pytest.raises(SystemExit, match="no step kernel: choose from machine, kernels"):
        runner.chosen("kernel")


def test_every_step_is_a_module() -> None:
    folder = Path(runner.__file__).parent / "steps"
    assert {path.stem for path in folder.glob("*.py")} - {"__init__"} == set(runner.BUDGETS)
