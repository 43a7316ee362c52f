"""Run the steps one after the other, each in a process of its own with a time budget."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.gpu import records
from tools.gpu.unpack import ROOT

# Step -> seconds, by value: a run that is cut off has shown the most. docs/development.md has the plan by minutes.
BUDGETS = {
    "machine": 60,
    "kernels": 180,
    "replay": 420,
    "card": 300,
    "steptimes": 540,
    "nosync": 240,
    "profile": 240,
    "engine": 540,
    "memory": 240,
    "sanitizer": 300,
}
STATUS = {0: "passed", 1: "failed", 3: "skipped"}
LOG = "steps"


@dataclass(frozen=True)
class Plan:
    """Steps to run.

    Attributes:
        steps: names, in order.
        minutes: for all of them together; each step gets its budget or what is left.
        arguments: for every step's command line.
        patience: times its budget that a step gets.
    """

    steps: tuple[str, ...]
    minutes: float
    arguments: tuple[str, ...] = ()
    patience: float = 1.0


def chosen(names: str) -> tuple[str, ...]:
    """Steps named in a comma-separated list, in the order of :data:`BUDGETS`; ``all`` or an empty list for all.

    Raises:
        SystemExit: an unknown name.
    """
    asked = [name for name in names.split(",") if name]
    if unknown := set(asked) - {*BUDGETS, "all"}:
        raise SystemExit(f"no step {', '.join(sorted(unknown))}: choose from {', '.join(BUDGETS)}")
    return tuple(step for step in BUDGETS if not asked or "all" in asked or step in asked)


def left(out: Path, steps: Sequence[str]) -> tuple[str, ...]:
    """Those of ``steps`` that have not passed yet in this folder of results."""
    last = {row["step"]: row["status"] for row in records.read(out, LOG)}
    return tuple(step for step in steps if last.get(step) not in ("passed", "skipped"))


def run(plan: Plan, out: Path, environment: dict[str, str], package: str = "tools.gpu.steps") -> bool:
    """Run the steps and record the status of each; False if one failed or ran out of time."""
    deadline = time.monotonic() + 60 * plan.minutes
    good = True
    for step in plan.steps:
        left = deadline - time.monotonic()
        if left < 1:
            status, seconds = "not started", 0.0
        else:
            command = [sys.executable, "-m", f"{package}.{step}", "--out", str(out), *plan.arguments]
            budget = min(plan.patience * BUDGETS.get(step, 60), left)
            status, seconds = _run_one(command, out / f"{step}.log", budget, environment)
        records.append(out, LOG, {"step": step, "status": status, "seconds": round(seconds, 1)})
        print(f"{step}: {status}, {seconds:.0f} s", flush=True)
        good &= status in ("passed", "skipped")
    return good


def _run_one(command: Sequence[str], log: Path, budget: float, environment: dict[str, str]) -> tuple[str, float]:
    """Run one step; its status and seconds. Every process it started ends with it."""
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = STATUS.get(process.wait(budget), "failed")
        except subprocess.TimeoutExpired:
            status = "out of time"
        finally:
            _end(process)
    return status, time.monotonic() - start


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a step and its servers, each of which leads a session of its own."""
    for session in [process.pid, *_sessions_of(process.pid)]:
        try:
            os.killpg(session, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


def _sessions_of(parent: int) -> list[int]:
    """Descendants of a live process; without psutil, which may not be installed."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        if int(fields[1]) == parent:
            child = int(stat.parent.name)
            found += [child, *_sessions_of(child)]
    return found
