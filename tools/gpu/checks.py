"""Steps without a server: the machine, our kernels against their definitions, and compute-sanitizer."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from functools import partial
from importlib.metadata import distributions
from typing import Any

from tools.gpu.run import Run
from tools.gpu.site import ROOT, STAND_INS

PACKAGES = ("torch", "triton", "numpy", "sglang", "sglang-dflash", "transformers", "flashinfer-python", "sglang-kernel")
PYTEST = (sys.executable, "-m", "pytest", "-q", "-rfE", "--noconftest", "-p", "no:cacheprovider")
CASES = ("tests/ops/cases.py", "tests/states/cases.py")


def machine(run: Run) -> bool:
    """Record device, driver and package versions."""
    import torch

    run.write(
        gpu=torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        driver=_output("nvidia-smi", "--query-gpu=driver_version,memory.total,clocks.sm", "--format=csv,noheader"),
        cuda=torch.version.cuda,
        python=platform.python_version(),
        packages={each.name: each.version for each in distributions() if each.name in PACKAGES},
        sgl_kernel="stand-ins" if str(STAND_INS) in sys.path else "compiled",
        commit=_output("git", "rev-parse", "--short", "HEAD"),
    )
    return torch.cuda.is_available() or not run.real


def _output(*command: str) -> str | None:
    if not shutil.which(command[0]):
        return None
    return _run(*command).stdout.strip() or None


def kernels(run: Run) -> bool:
    """Compare our Triton kernels with their definitions in torch."""
    return run.measure({"cases": "kernels"}, partial(compared, run, *CASES))


def compared(run: Run, *files: str) -> dict[str, Any]:
    """Run the cases in ``files`` on the device, or under Triton's interpreter. Return pytest's last line."""
    device, interpret, chosen = ("cuda", "0", ()) if run.real else ("cpu", "1", ("-k", "not 27B and not 35B"))
    ended = _run(*PYTEST, *chosen, *files, OPS_DEVICE=device, TRITON_INTERPRET=interpret)
    print(ended.stdout, ended.stderr, flush=True)
    last = (ended.stdout.strip().splitlines() or ["no output"])[-1]
    return {"result": last, **({"error": ended.stdout[-4000:] + last} if ended.returncode else {})}


def sanitizer(run: Run) -> bool | None:
    """Run our kernels under compute-sanitizer, if it is installed: out-of-bounds accesses and races."""
    if not (run.real and (program := shutil.which("compute-sanitizer"))):
        print("skipped: needs CUDA and compute-sanitizer", flush=True)
        return None
    tools = ("memcheck", "racecheck")
    return run.measure_each(({"tool": tool}, partial(_sanitized, program, tool)) for tool in tools)


def _sanitized(program: str, tool: str) -> dict[str, Any]:
    # With torch's cache, accesses beyond a tensor would stay within one allocation.
    environment = {"OPS_DEVICE": "cuda", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    ended = _run(program, f"--tool={tool}", *PYTEST, *CASES, **environment)
    found = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", ended.stdout)
    if found is None or found[1] != "0":
        return {"error": ended.stdout[-2000:] + ended.stderr[-500:]}
    return {"errors": 0}


def _run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **environment}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
