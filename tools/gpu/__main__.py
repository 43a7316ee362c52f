"""``python -m tools.gpu``: run the kit's steps on a machine with a GPU (docs/development.md).

Each step runs in its own process with a time budget. A call prints the steps that are left; the next call runs those.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tools.gpu import records, site

# Step -> module and budget in seconds. Most valuable first, because the machine may be lost at any time.
STEPS = {
    "machine": ("checks", 60),
    "kernels": ("checks", 180),
    "exact": ("exact", 540),
    "replay": ("tiny", 420),
    "card": ("published", 300),
    "steptimes": ("published", 540),
    "nosync": ("tiny", 240),
    "profile": ("published", 240),
    "engine": ("tiny", 540),
    "sanitizer": ("checks", 300),
}
EXIT_STATUS = {0: "passed", 1: "failed", 3: "skipped"}
DONE = ("passed", "skipped")


def left(out: Path) -> list[str]:
    """Return the steps that have not passed yet in this results folder."""
    last = {row["step"]: row["status"] for row in records.read(out, records.STATUS)}
    return [step for step in STEPS if last.get(step) not in DONE]


def run_steps(steps: Sequence[str], out: Path, command: Callable[[str], list[str]], minutes: float) -> bool:
    """Run each step's command, ``minutes`` at most in all. Return False if one failed or ran out of time."""
    deadline, good = time.monotonic() + 60 * minutes, True
    for step in steps:
        budget = min(STEPS[step][1], deadline - time.monotonic())
        start = time.monotonic()
        status = _run(command(step), out / f"{step}.log", budget) if budget > 1 else "not started"
        seconds = round(time.monotonic() - start, 1)
        records.append(out, records.STATUS, {"step": step, "status": status, "seconds": seconds})
        print(f"{step}: {status}, {seconds:.0f} s", flush=True)
        good &= status in DONE
    return good


def _run(command: Sequence[str], log: Path, budget: float) -> str:
    """Run one step and return its status. A step out of time gets SIGTERM, on which it stops its servers."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=site.ROOT, stdout=file, stderr=file, start_new_session=True)
        try:
            return EXIT_STATUS.get(process.wait(budget), "failed")
        except subprocess.TimeoutExpired:
            return "out of time"
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu", description="Run the kit's steps.")
    parser.add_argument("--steps", default="", help=f"comma-separated, of {', '.join(STEPS)}; default: those left")
    parser.add_argument("--device", choices=(site.CUDA, site.CPU), default=site.CUDA)
    parser.add_argument("--minutes", type=float, default=9.5, help="limit for all steps together")
    parser.add_argument("--pairs", default="", help="comma-separated; default: all pairs of a step")
    parser.add_argument("--site", type=Path, default=Path(tempfile.gettempdir(), "gpu-kit"), help="unpacked wheelhouse")
    parser.add_argument("--out", type=Path, default=Path("results/gpu"))
    parser.add_argument("--inside", metavar="STEP", help=argparse.SUPPRESS)  # the process of one step
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that servers are stopped
    out, unpacked = asked.out.absolute(), asked.site.absolute()
    options = ["--device", asked.device, "--pairs", asked.pairs, "--out", str(out)]
    if asked.inside:
        from tools.gpu.run import Run

        body = getattr(importlib.import_module(f"tools.gpu.{STEPS[asked.inside][0]}"), asked.inside)
        passed = body(Run(asked.device, out, asked.inside, tuple(filter(None, asked.pairs.split(",")))))
        sys.exit({True: 0, False: 1, None: 3}[passed])
    steps = asked.steps.split(",") if asked.steps else left(out)
    if unknown := set(steps) - set(STEPS):
        parser.error(f"no step {', '.join(sorted(unknown))}; choose from {', '.join(STEPS)}")
    site.unpack(unpacked)
    os.environ.update(site.environment(unpacked, asked.device))
    inside = [sys.executable, "-m", "tools.gpu", *options, "--inside"]
    good = run_steps(steps, out, lambda step: [*inside, step], asked.minutes)
    print(records.summary(out))
    print("left:", ", ".join(left(out)) or "nothing")
    if text := records.page(out, list(STEPS), asked.device):
        result = site.ROOT / "docs/results/gpu.md" if asked.device == site.CUDA else out / "page.md"
        result.write_text(text)
    sys.exit(not good)


if __name__ == "__main__":
    main()
