"""The GPU kit: its runner, records and traces; and drift, which names what a release lacks."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.house.contract import Symbol
from tools import drift
from tools.gpu import __main__ as runner
from tools.gpu import records
from tools.gpu.run import Run
from tools.gpu.trace import per_step

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


def test_a_step_without_half_of_its_time_left_is_not_started_unless_it_is_the_first(tmp_path: Path) -> None:
    assert run(tmp_path / "a", "nosync", minutes=0) == (False, ["not started"])
    assert run(tmp_path / "b", "nosync", "card", minutes=1) == (False, ["passed", "not started"])


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


def test_the_page_has_the_newest_rows_of_a_real_device_and_the_ratio_of_step_times(tmp_path: Path) -> None:
    for arm, times in (("ours", [9.0, 9.0]), ("builtin", [4.0, 5.0]), ("ours", [3.0, 4.0])):
        row = {"device": "cuda", "pair": "P", "batch": 8, "arm": arm, "step_ms": times}
        records.append(tmp_path, "steptimes", row)
    records.append(tmp_path, "machine", {"device": "cpu", "packages": {"torch": "1"}})
    page = records.page(tmp_path, list(runner.STEPS))
    assert page is not None and page.count("\n## ") == 1
    assert "| P | 8 | ours | 3.50 [3.00, 4.00] |\n| P | 8 | builtin | 4.50 [4.00, 5.00] |\n" in page
    assert "- P, batch 8: ours / builtin = 0.78\n" in page
    assert "torch 1" in str(records.page(tmp_path, ["machine"], "cpu"))
    assert records.page(tmp_path, ["kernels"]) is None


def event(cat: str, name: str, correlation: int, ts: float = 0, dur: float = 0) -> dict[str, Any]:
    return {"cat": cat, "name": name, "ts": ts, "dur": dur, "args": {"correlation": correlation}}


# Two steps: two launches, a graph of three kernels and a copy. The device is busy from 10 to 25, 30 to 40 and 50 to 60.
TRACE = [
    {"ph": "M", "name": "process_name"},
    event("cpu_op", "cudaLaunchKernel of an operator", 0),
    event("cuda_runtime", "cudaLaunchKernel", 1),
    event("cuda_driver", "cuLaunchKernelEx", 2),
    event("cuda_runtime", "cudaGraphLaunch", 3),
    event("cuda_runtime", "cudaMemcpyAsync", 4),
    event("cuda_runtime", "cudaStreamSynchronize", 5),
    event("kernel", "last", 2, 50, 10),
    event("kernel", "first", 1, 10, 10),
    event("kernel", "in a graph", 3, 15, 10),
    event("kernel", "inside another", 3, 32, 2),
    event("kernel", "in a graph", 3, 30, 10),
    event("gpu_memcpy", "Memcpy DtoH", 4, 100, 50),
]


def test_a_step_has_its_share_of_launches_and_the_device_idles_between_kernels() -> None:
    found = per_step(TRACE, steps=2)
    assert (found["launches"], found["graph_launches"], found["copies"]) == (1, 0.5, 0.5)
    assert (found["kernels"], found["kernels_outside_graphs"]) == (2.5, 1)
    assert found["idle"] == pytest.approx(0.3)
    assert next(iter(found["longest_ms"].items())) == ("in a graph", 0.01)
    assert per_step(TRACE[:2], steps=1)["idle"] is None


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
