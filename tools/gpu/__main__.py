"""``python -m tools.gpu``: run the kit's one call on a machine with a GPU (docs/development.md)."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.gpu import rows, site

if TYPE_CHECKING:
    from tools.gpu.call import Job

PYTEST = (sys.executable, "-m", "pytest", "-q", "-rfE", "--noconftest", "-p", "no:cacheprovider")
# Those that decide tokens by default come first.
CASES = (
    *("tests/states/convolution_cases.py", "tests/ops/attention_cases.py", "tests/states/cases.py"),
    *("tests/ops/cases.py", "tests/states/exact_cases.py"),
)
CORES = 3  # of the host, for each job
RANDOM = "weights of pairs with published names; prompts of the step times; widths where an arm says so"
# What `machine` reports: torch's build, and the distributions that compute.
VERSIONS = {"torch": "torch", "triton": "triton", "sglang": "sglang", "kernels": "sglang-kernel"}


def plan(real: bool) -> list[Job]:
    """Return the jobs, the most valuable first: texts, kernels, steps, parts of a layer. They start in this order."""
    from tools.gpu import steps, texts
    from tools.gpu.call import Job

    fa3 = real and site.has_fa3()
    chosen = {pair: arms | (texts.FA3 if fa3 else {}) for pair, arms in texts.CHOSEN.items()}
    hybrid, *others = (texts.jobs(pair, arms, real) for pair, arms in chosen.items())
    exact = texts.jobs("tiny-hybrid", texts.EXACT, real, exact=True)
    servers = steps.jobs((rows.OURS, steps.ONE_FORWARD, rows.BUILTIN, rows.PLAIN))
    adaptive, *widths = steps.jobs((steps.ADAPTIVE, *steps.WIDTHS))
    cases = case_jobs(CASES if real else CASES[3:4])
    compiling = Job("micro kernels", 3, partial(_micro, "--warm"), "micro")
    packed = [Job("modules", 1, _modules, "modules")] if os.environ["GPU_KIT_MODULES"] else []
    micro = Job("micro", 24, _micro, "micro", alone=True)
    texts_of_others = [*itertools.chain(*others), *exact]
    if not real:  # two at a time: a server that waits for its turn holds one of two places
        small = [*hybrid, *texts_of_others, *cases, *packed, *servers, micro, adaptive]
        return [replace(job, gib=1) for job in small]
    hoppers = steps.jobs(tuple(arm for arm in steps.ARMS if arm.startswith(rows.FA3))) if fa3 else []
    return [*hybrid, *cases, *servers, compiling, micro, *hoppers, *widths, adaptive, *texts_of_others, *packed]


def case_jobs(files: Sequence[str]) -> list[Job]:
    from tools.gpu.call import Job

    return [Job(f"cases {file}", 3, partial(_cases, file), "cases") for file in files]


def _cases(file: str, job: Job) -> dict[str, Any]:
    """Run the cases on the device, or a few under Triton's interpreter."""
    real = job.call.real
    environment = {"OPS_DEVICE": job.call.device, "TRITON_INTERPRET": "0" if real else "1"}
    ended = _run(job, *PYTEST, *(() if real else ("-k", "prepare_block")), file, **environment)
    last = (ended.stdout.strip().splitlines() or [ended.stderr[-500:]])[-1]
    return {"files": file, "result": last, **({"error": ended.stdout[-3000:] + last} if ended.returncode else {})}


def _micro(*arguments: Any) -> None:
    *options, job = arguments
    ended = _run(job, sys.executable, "-m", "tools.gpu.micro", str(job.call.out), job.call.device, *options)
    assert not ended.returncode, ended.stderr[-3000:]


def _modules(job: Job) -> dict[str, Any]:
    """Return which packed modules the servers used, and which modules they lacked."""
    used = {row["key"]: row["packed"] for row in rows.read(job.call.out / "modules")}
    missing = [key for key, packed in used.items() if not packed]
    return {"handed_out": len(used) - len(missing), "missing": missing or None}


def _run(job: Job, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, **environment}
    ended = subprocess.run(command, cwd=site.ROOT, env=variables, capture_output=True, text=True, check=False)
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
    git = f"git -C {site.ROOT} rev-parse --short=8 HEAD"
    commit = subprocess.run(git.split(), capture_output=True, text=True, check=False) if shutil.which("git") else None
    found |= {"commit": commit and commit.stdout.strip(), "random": RANDOM, "gpu": device}
    if device == site.CUDA:
        query = "nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader,nounits --id=0"
        name, memory, driver = subprocess.check_output(query.split(), text=True).strip().split(", ")
        found |= {"gpu": name, "memory_mib": int(memory), "driver": driver, "floor_tb_s": rows.rate_of(name)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu", description="Run the kit's one call.")
    parser.add_argument("--device", choices=(site.CUDA, site.CPU), default=site.CUDA)
    parser.add_argument(
        "--seconds", type=float, default=290, help="limit of the call; jobs that still run are recorded"
    )
    parser.add_argument("--only", default="", help="comma-separated beginnings of jobs' names; default: all")
    parser.add_argument("--site", type=Path, default=Path(tempfile.gettempdir(), "gpu-kit"), help="unpacked wheelhouse")
    parser.add_argument("--out", type=Path, default=Path("results/gpu"), help="new folder for rows, logs and traces")
    parser.add_argument("--page", type=Path, metavar="FOLDER", help="write the page FOLDER.md of its rows, and end")
    parser.add_argument("--inside", type=float, metavar="BEGAN", help=argparse.SUPPRESS)  # with the site's packages
    asked = parser.parse_args()
    if asked.page:
        asked.page.with_suffix(".md").write_text(rows.page(rows.read(asked.page)))
        return
    out, unpacked, began = asked.out.absolute(), asked.site.absolute(), time.time()
    if not asked.inside:
        if (out / rows.FILE).exists():
            parser.error(f"{out} has rows of an earlier call: choose another folder")
        site.unpack(unpacked)
        environment = {**site.environment(unpacked), "GPU_KIT_OUT": str(out / "modules")}
        os.execve(sys.executable, [sys.executable, "-m", "tools.gpu", *sys.argv[1:], f"--inside={began}"], environment)
    import psutil

    from tools.gpu.call import Call

    here = machine(asked.device)
    # what a slice does not count: graphs' bookkeeping and what libraries allocate by themselves
    gib = 0.95 * here["memory_mib"] / 1024 if asked.device == site.CUDA else 2
    # a starting server compiles on several cores
    call = Call(asked.device, out, gib, asked.seconds, asked.inside, max(2, (os.cpu_count() or 2) // CORES))
    call.write("machine", **here)
    beginnings = tuple(filter(None, asked.only.split(",")))
    call.run([job for job in plan(call.real) if not beginnings or job.name.startswith(beginnings)])
    found = rows.read(out)
    (out / "page.md").write_text(rows.page(found))
    with tarfile.open(out.with_name(f"{out.name}.tar.xz"), "w:xz") as packed:  # a machine may return a few files only
        packed.add(out, out.name)
    print(json.dumps(found[-1]), flush=True)
    for process in psutil.Process().children(recursive=True):  # of jobs that the clock ended
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    os._exit(any("error" in row for row in found))


if __name__ == "__main__":
    main()
