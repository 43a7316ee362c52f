"""The accelerator this machine has, asked of its driver: no framework is loaded and no context is created."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass

_QUERY = ("--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader,nounits")


@dataclass(frozen=True)
class Device:
    """One GPU.

    Attributes:
        name: as the driver names it.
        memory: bytes.
        capability: CUDA compute capability, ``(9, 0)`` for Hopper.
    """

    name: str
    memory: int
    capability: tuple[int, int]

    @property
    def is_blackwell(self) -> bool:
        return self.capability[0] >= 10


def find_device() -> Device | None:
    """The first NVIDIA GPU, None where there is no driver or no GPU."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    answer = subprocess.run([command, *_QUERY], capture_output=True, text=True, timeout=20, check=False)
    return parse(answer.stdout) if answer.returncode == 0 else None


def parse(answer: str) -> Device | None:
    """Read ``nvidia-smi``'s first line: name, memory in MiB, compute capability."""
    first = next((line for line in answer.splitlines() if line.count(",") >= 2), None)
    if first is None:
        return None
    name, memory, capability = (part.strip() for part in first.rsplit(",", 2))
    major, _, minor = capability.partition(".")
    return Device(name, int(memory) << 20, (int(major), int(minor or 0)))
