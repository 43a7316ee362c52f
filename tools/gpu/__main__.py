"""``python -m tools.gpu``: run the kit's one call on a machine with a GPU (docs/development.md)."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.gpu import rows, site

if TYPE_CHECKING:
    from tools.gpu.call import Job

PYTEST = (sys.executable, "-m", "pytest", "-q", "-rfE", "--noconftest", "-p", "no:cacheprovider")
CASES = ("tests/ops/cases.py", "tests/states/cases.py", "tests/states/exact_cases.py")
RANDOM = "weights of pairs with published names; prompts of the step times; widths where an arm says so"
# What `machine` reports: torch's build, and the distributions that compute.
VERSIONS = {"torch": "torch", "triton": "triton", "sglang": "sglang", "kernels": "sglang-kernel"}


def plan(real: bool) -> list[Job]:
    """Return the jobs, the most valuable first; they start in this order where memory allows."""
    from tools.gpu import steps, texts
    from tools.gpu.call import Job

    published = steps.jobs((rows.OURS, rows.BUILTIN, rows.PLAIN, "kept", steps.ADAPTIVE), real)
    cases = [Job(f"cases {Path(file).parent.name} {Path(file).stem}", 3, _cases(file), "cases") for file in CASES]
    exact = texts.jobs("tiny-hybrid", ("replayed",), real, exact=True)
    found = [job for pair, arms in texts.CHOSEN.items() for job in texts.jobs(pair, arms, real)]
    first, rest = found[:4], found[4:]
    micro = [
        Job("micro compiled", 3, lambda job: _micro(job, "--warm"), "micro"),
        Job("micro", 24, lambda job: _micro(job), "micro", alone=True),
    ]
    packed = [Job("modules", 1, _modules, "modules")] if os.environ["GPU_KIT_MODULES"] else []
    if not real:
        small = [*first, *published[:3], *rest, *exact, cases[0], *packed, micro[1], published[4]]
        return [replace(job, gib=1) for job in small]
    return [
        *(*first, *published[:3], *rest, *exact, micro[0], *cases, published[3]),
        *(*packed, micro[1], published[4]),
    ]


def _cases(file: str) -> Any:
    def run(job: Job) -> None:
        """Run the cases on the device, or a few under Triton's interpreter."""
        device, interpret, chosen = ("cuda", "0", ()) if job.call.real else ("cpu", "1", ("-k", "prepare_block"))
        environment = {**os.environ, "OPS_DEVICE": device, "TRITON_INTERPRET": interpret}
        ended = _run(job, *PYTEST, *chosen, file, environment=environment)
        last = (ended.stdout.strip().splitlines() or [ended.stderr[-500:]])[-1]
        failed = {"error": ended.stdout[-3000:] + last} if ended.returncode else {}
        job.row("cases", files=file, result=last, **failed)

    return run


def _micro(job: Job, *options: str) -> None:
    command = [sys.executable, "-m", "tools.gpu.micro", str(job.call.out), job.call.device, *options]
    ended = _run(job, *command, environment=dict(os.environ))
    assert not ended.returncode, ended.stderr[-3000:]


def _modules(job: Job) -> None:
    """Load the packed modules, and record which the servers used and which they lacked."""
    from tools.gpu import modules

    used = {row["key"]: row["packed"] for row in rows.read(job.call.out / "modules")}
    missing = [key for key, packed in used.items() if not packed]
    job.row("modules", **modules.check(), handed_out=len(used) - len(missing), missing=missing or None)


def _run(job: Job, *command: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    ended = subprocess.run(command, cwd=site.ROOT, env=environment, capture_output=True, text=True, check=False)
    (job.folder / "output.log").write_text(ended.stdout + ended.stderr)
    return ended


def machine(device: str) -> dict[str, Any]:
    """Return date, device, driver and versions."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    import torch

    found: dict[str, Any] = {"date": datetime.now(UTC).date().isoformat(), "python": platform.python_version()}
    for column, name in VERSIONS.items():
        with contextlib.suppress(PackageNotFoundError):
            found[column] = torch.__version__ if name == "torch" else version(name)
    git = shutil.which("git") and subprocess.run(
        ["git", "rev-parse", "--short=8", "HEAD"], cwd=site.ROOT, capture_output=True, text=True, check=False
    )
    found |= {"commit": git.stdout.strip() if git else None, "random": RANDOM, "gpu": device}
    if device == site.CUDA:
        query = [
            "nvidia-smi",
            "--query-gpu=name,memory.total,driver_version",
            "--format=csv,noheader,nounits",
            "--id=0",
        ]
        name, memory, driver = subprocess.check_output(query, text=True).strip().split(", ")
        found |= {"gpu": name, "memory_mib": int(memory), "driver": driver, "floor_tb_s": rows.rate_of(name)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu", description="Run the kit's one call.")
    parser.add_argument("--device", choices=(site.CUDA, site.CPU), default=site.CUDA)
    parser.add_argument("--seconds", type=float, default=290, help="limit of the call; jobs that run then are recorded")
    parser.add_argument("--only", default="", help="comma-separated beginnings of jobs' names; default: all")
    parser.add_argument("--site", type=Path, default=Path(tempfile.gettempdir(), "gpu-kit"), help="unpacked wheelhouse")
    parser.add_argument("--out", type=Path, default=Path("results/gpu"), help="new folder for rows, logs and traces")
    parser.add_argument("--page", type=Path, metavar="FOLDER", help="print the page of the rows in FOLDER, and end")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)  # with the packages of the site
    asked = parser.parse_args()
    if asked.page:
        print(rows.page(rows.read(asked.page)), end="")
        return
    out, unpacked = asked.out.absolute(), asked.site.absolute()
    if not asked.inside:
        if (out / rows.FILE).exists():
            parser.error(f"{out} has rows of an earlier call: choose another folder")
        site.unpack(unpacked)
        environment = {**site.environment(unpacked), "GPU_KIT_OUT": str(out / "modules")}
        os.execve(sys.executable, [sys.executable, "-m", "tools.gpu", *sys.argv[1:], "--inside"], environment)
    from tools.gpu.call import Call

    here = machine(asked.device)
    # what a slice does not count: graphs' bookkeeping and what libraries allocate by themselves
    gib = 0.95 * here["memory_mib"] / 1024 if asked.device == site.CUDA else 2
    call = Call(asked.device, out, gib, asked.seconds)
    call.write("machine", **here)
    beginnings = tuple(filter(None, asked.only.split(",")))
    call.run([job for job in plan(call.real) if not beginnings or job.name.startswith(beginnings)])
    found = rows.read(out)
    (out / "page.md").write_text(rows.page(found))
    print(json.dumps(found[-1]))
    sys.stdout.flush()
    # threads of jobs that the clock ended still wait for their servers
    os._exit(any("error" in row for row in found))


if __name__ == "__main__":
    main()
