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

# Step -> module and budget in seconds. Most valuable first, because the machine may be lost at any time. Each line is a
# call of ten minutes at most, with half a minute to unpack the wheelhouse.
STEPS = {
    **{"machine": ("checks", 30), "kernels": ("checks", 150), "engine": ("tiny", 330)},
    **{"steptimes": ("published", 510)},
    **{"replay": ("tiny", 300), "nosync": ("tiny", 210)},
    **{"sanitizer": ("checks", 270), "card": ("published", 240)},
    **{"exact": ("tiny", 510)},
}
EXIT_STATUS = {0: "passed", 1: "failed", 3: "skipped"}
DONE = ("passed", "skipped")


def left(out: Path) -> list[str]:
    """Return the steps that have not passed yet in this results folder."""
    last = {row["step"]: row["status"] for row in records.read(out, records.STATUS)}
    return [step for step in STEPS if last.get(step) not in DONE]


def run_steps(steps: Sequence[str], out: Path, command: Callable[[str], list[str]], minutes: float) -> bool:
    """Run each step's command, ``minutes`` at most in all. Return False if one failed or ran out of time.

    A step is not started without half of its budget, unless it is the first. More than nine minutes stretch budgets.
    """
    deadline, good = time.monotonic() + 60 * minutes, True
    for step in steps:
        start, budget = time.monotonic(), STEPS[step][1] * max(1, minutes / 9)
        left = deadline - start
        startable = left > (0 if step == steps[0] else budget / 2)
        status = _run(command(step), out / f"{step}.log", min(budget, left)) if startable else "not started"
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
    parser.add_argument("--minutes", type=float, default=9, help="limit for all steps together")
    parser.add_argument("--pairs", default="", help="comma-separated; default: the step's own choice")
    parser.add_argument("--arms", default="", help="comma-separated; default: the step's own choice")
    parser.add_argument("--site", type=Path, default=Path(tempfile.gettempdir(), "gpu-kit"), help="unpacked wheelhouse")
    parser.add_argument("--out", type=Path, default=Path("results/gpu"))
    parser.add_argument("--inside", metavar="STEP", help=argparse.SUPPRESS)  # the process of one step
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that servers are stopped
    out, unpacked = asked.out.absolute(), asked.site.absolute()
    options = ["--device", asked.device, "--pairs", asked.pairs, "--arms", asked.arms, "--out", str(out)]
    if asked.inside:
        from tools.gpu.run import Run

        body = getattr(importlib.import_module(f"tools.gpu.{STEPS[asked.inside][0]}"), asked.inside)
        chosen = (tuple(filter(None, names.split(","))) for names in (asked.pairs, asked.arms))
        passed = body(Run(asked.device, out, asked.inside, *chosen))
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
