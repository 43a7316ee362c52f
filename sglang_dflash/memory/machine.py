"""The machine that serves a pair: this one, asked of its driver or of torch, or another that a user asks about."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from sglang_dflash.errors import DFlashError

MIB = 1 << 20
GIB = 1 << 30


def size(count: float) -> str:
    """``"2.27 GiB"``, ``"41.0 MiB"``, ``"20.0 KiB"``; nothing for none."""
    if count >= GIB:
        return f"{count / GIB:.2f} GiB"
    if count >= MIB:
        return f"{count / MIB:.1f} MiB"
    return f"{count / 1024:.1f} KiB" if count else ""


_MOST_GIB = 1 << 20
_QUERY = ("--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader,nounits")
_DRIVER = Path("/dev/nvidiactl")  # there wherever the kernel has the driver, in containers too
# The same line from torch, in a process of its own: this one may neither load torch nor create a CUDA context.
_ASK_TORCH = """
import torch
if torch.cuda.is_available():
    gpu = torch.cuda.get_device_properties(0)
    print(gpu.name, gpu.total_memory >> 20, f"{gpu.major}.{gpu.minor}", sep=", ")
"""


@dataclass(frozen=True)
class Machine:
    """The device of one rank.

    Attributes:
        kind: ``"gpu"`` for an NVIDIA GPU, ``"cpu"`` for the CPU platform.
        name: as the driver names it.
        memory: bytes of the device; None if unknown.
        capability: CUDA compute capability, ``(9, 0)`` for Hopper; None if unknown.
        told_by: the program that was asked last; None for a machine that is not here.
    """

    kind: Literal["gpu", "cpu"]
    name: str
    memory: int | None = None
    capability: tuple[int, int] | None = None
    told_by: Literal["nvidia-smi", "torch"] | None = None

    @property
    def is_blackwell(self) -> bool:
        return self.capability is not None and self.capability[0] >= 10


CPU = Machine("cpu", "a CPU")
UNKNOWN_GPU = Machine("gpu", "an unknown GPU")
# Memory as nvidia-smi reports it, which is neither the GB nor the GiB of a data sheet: https://thundergolfer.com/blog/
# nvidia-gpu-memory-capacity for Hopper, https://github.com/NVIDIA/TensorRT-LLM/issues/10278 for the B200. Compute
# capability from https://developer.nvidia.com/cuda-gpus.
GPUS = {
    "h100": Machine("gpu", "NVIDIA H100 80GB HBM3", 81_559 * MIB, (9, 0)),
    "h200": Machine("gpu", "NVIDIA H200", 143_771 * MIB, (9, 0)),
    "b200": Machine("gpu", "NVIDIA B200", 183_359 * MIB, (10, 0)),
}


def find_gpu() -> Machine | None:
    """The first NVIDIA GPU; None without a driver or a GPU.

    nvidia-smi answers in no time, but many containers lack it, and of a GPU that shares the machine's memory it knows
    none. Then torch is asked.
    """
    command = shutil.which("nvidia-smi")
    found = _answer(command, *_QUERY) if command else None
    if found is not None and found.memory is not None:
        return replace(found, told_by="nvidia-smi")
    by_torch = _answer(sys.executable, "-c", _ASK_TORCH) if found or _DRIVER.exists() else None
    if found is None and by_torch is None:
        return None
    return replace(by_torch or found, told_by="torch")  # type: ignore[type-var]


def _answer(*command: str) -> Machine | None:
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return parse(answer.stdout) if answer.returncode == 0 else None


def parse(answer: str) -> Machine | None:
    """Read ``nvidia-smi``'s first line: name, memory in MiB, compute capability.

    A number that the driver does not know (``[N/A]``, as on GPUs that share the machine's memory) is None.
    """
    first = next((line for line in answer.splitlines() if line.count(",") >= 2), None)
    if first is None:
        return None
    name, memory, capability = (part.strip() for part in first.rsplit(",", 2))
    major, _, minor = capability.partition(".")
    known = all(re.fullmatch("[0-9]{1,3}", each) for each in (major, minor or "0"))
    return Machine(
        "gpu",
        name,
        int(memory) * MIB if re.fullmatch("[0-9]{1,9}", memory) else None,
        (int(major), int(minor or 0)) if known else None,
    )


def asked_about(device: str | None, memory_gib: float | None, gpu: str | None = None) -> Machine:
    """The machine that a command line asks about.

    Args:
        device: ``--device``; ``"cpu"`` is the CPU platform. None asks about this machine, or with ``memory_gib`` about
            a GPU.
        memory_gib: memory of another machine, GiB.
        gpu: a name in :data:`GPUS`; decides alone.

    Raises:
        DFlashError: no machine has so much memory.
    """
    if gpu is not None:
        return GPUS[gpu]
    if memory_gib is not None:
        if not 0 < memory_gib < _MOST_GIB:
            raise DFlashError(f"--memory-gib {memory_gib}", expected=f"up to {_MOST_GIB}", remedy="correct it")
        asked = CPU if device == "cpu" else UNKNOWN_GPU
        return replace(asked, name=f"a {asked.kind.upper()} with {memory_gib:g} GiB", memory=int(memory_gib * GIB))
    if device == "cpu":
        return CPU
    return find_gpu() or (UNKNOWN_GPU if device else CPU)
