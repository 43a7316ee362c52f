"""Provenance of a figure: command, commit, versions, hardware, environment."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import psutil

_PACKAGES = ("sglang-dflash", "sglang", "torch", "transformers", "triton", "flashinfer-python", "numpy")
_VARIABLES = ("SGLANG_", "OMP_", "MKL_", "CUDA_VISIBLE", "NCCL_", "PYTORCH_", "HF_HUB_OFFLINE")


def collect(settings: dict[str, Any]) -> dict[str, Any]:
    versions = {each.name: each.version for each in distributions() if each.name in _PACKAGES}
    return {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        # "-dirty" with uncommitted changes; empty outside a repository.
        "commit": _output("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"),
        "versions": {"python": platform.python_version(), **versions},
        "hardware": hardware(),
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_VARIABLES)},
        "settings": settings,
    }


def hardware() -> dict[str, Any]:
    """Return CPU, usable cores, memory in GiB, and GPUs."""
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    gpus = _output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": gpus.splitlines(),
    }


def describe_hardware(row: dict[str, Any]) -> str:
    if gpus := row["gpus"]:
        return f"{len(gpus)}x {gpus[0]}"
    cores = "1 core" if row["cores"] == 1 else f"{row['cores']} cores"
    return f"{cores} of {row['cpu']}, {row['memory_gib']} GiB, no GPU"


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
