"""Steps without a server: the machine, our kernels against their definitions, and compute-sanitizer."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from importlib.metadata import distributions

from tools.gpu.run import Run
from tools.gpu.site import ROOT

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
        commit=_output("git", "rev-parse", "--short", "HEAD"),
    )
    return torch.cuda.is_available() or not run.real


def _output(*command: str) -> str | None:
    if not shutil.which(command[0]):
        return None
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None


def kernels(run: Run) -> bool:
    """Compare our Triton kernels with their definitions in torch."""
    device, interpret = ("cuda", "0") if run.real else ("cpu", "1")
    environment = {**os.environ, "OPS_DEVICE": device, "TRITON_INTERPRET": interpret}
    ended = subprocess.run([*PYTEST, *CASES], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    print(ended.stdout, ended.stderr, flush=True)
    last = (ended.stdout.strip().splitlines() or ["no output"])[-1]
    run.write(cases=last, **({"error": ended.stdout[-4000:] + last} if ended.returncode else {}))
    return ended.returncode == 0


def sanitizer(run: Run) -> bool | None:
    """Run our kernels under compute-sanitizer, if it is installed: out-of-bounds accesses and races."""
    if not (run.real and (program := shutil.which("compute-sanitizer"))):
        return None
    passed = True
    # With torch's cache, accesses beyond a tensor would stay within one allocation.
    environment = {**os.environ, "OPS_DEVICE": "cuda", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    for tool in ("memcheck", "racecheck"):
        command = [program, f"--tool={tool}", *PYTEST, *CASES]
        ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        found = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", ended.stdout)
        clean = found is not None and found[1] == "0"
        error = {} if clean else {"error": ended.stdout[-2000:] + ended.stderr[-500:]}
        run.write(tool=tool, errors=int(found[1]) if found else None, **error)
        passed &= clean
    return passed
