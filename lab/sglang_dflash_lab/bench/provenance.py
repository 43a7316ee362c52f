"""Provenance of a figure: command, commit, versions, hardware, settings. One line in every results file."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

_PACKAGES = ("sglang-dflash", "sglang", "torch", "transformers", "triton", "flashinfer-python", "httpx", "numpy")
_VARIABLES = ("SGLANG_", "OMP_", "MKL_", "CUDA_VISIBLE", "NCCL_", "PYTORCH_", "HF_HUB_OFFLINE")


def collect(settings: dict[str, Any]) -> dict[str, Any]:
    """The provenance of this invocation; ``settings`` are the benchmark's own, seeds included."""
    return {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "time": now(),
        "commit": _commit(),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES},
        "hardware": hardware(),
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_VARIABLES)},
        "settings": settings,
    }


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def hardware() -> dict[str, Any]:
    """CPU, cores this process may use, memory in GiB, GPUs; what the client's machine has."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": _gpus(),
        "system": platform.platform(),
    }


def describe_hardware(row: dict[str, Any]) -> str:
    """One phrase for a table's caption."""
    gpus = row["gpus"]
    if gpus:
        return f"{len(gpus)}x {gpus[0]}"
    cores = "1 core" if row["cores"] == 1 else f"{row['cores']} cores"
    return f"{cores} of {row['cpu']}, {row['memory_gib']} GiB, no GPU"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Commit of the source tree this package runs from, ``-dirty`` if it has uncommitted changes; None installed."""
    git = ["git", "-C", str(Path(__file__).parent)]
    tracked = _output([*git, "ls-files", Path(__file__).name])
    return _output([*git, "describe", "--always", "--dirty", "--abbrev=12"]) if tracked else None


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gpus() -> list[str]:
    listing = _output(["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"])
    return [line.strip() for line in listing.splitlines() if line.strip()]


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
