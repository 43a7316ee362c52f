"""The machine: device, driver, package versions and available tools."""

from __future__ import annotations

import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version

from tools.gpu.run_step import Run, main

TOOLS = ("nvcc", "ncu", "nsys", "compute-sanitizer", "nvidia-smi")
PACKAGES = ("torch", "triton", "numpy", "sglang", "sglang-dflash", "transformers", "flashinfer-python", "sglang-kernel")


def body(run: Run) -> bool:
    import torch

    run.write(
        gpu=torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        driver=_output("nvidia-smi", "--query-gpu=driver_version,memory.total,clocks.sm", "--format=csv,noheader"),
        cuda=torch.version.cuda,
        python=platform.python_version(),
        packages={name: _version(name) for name in PACKAGES},
        tools=[name for name in TOOLS if shutil.which(name)],
        commit=_output("git", "rev-parse", "--short", "HEAD"),
    )
    return not run.real or torch.cuda.is_available()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    if not shutil.which(command[0]):
        return None
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None


if __name__ == "__main__":
    main("machine", body)
