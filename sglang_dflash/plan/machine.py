"""The machine that serves a pair: this one, as its driver or torch describes it, or another that a user names."""

from __future__ import annotations

import os
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
_QUERY = ("--query-gpu=name,memory.total,compute_cap,uuid,mig.mode.current", "--format=csv,noheader,nounits")
_SECONDS = 60  # to wait for one answer
_DRIVER = Path("/dev/nvidiactl")  # there wherever the kernel has the driver, in containers too
# The same line from torch, in a process of its own: this one may neither load torch nor create a CUDA context.
_ASK_TORCH = """
import sys
import torch
index = int(sys.argv[1])
if index < torch.cuda.device_count():
    gpu = torch.cuda.get_device_properties(index)
    print(gpu.name, gpu.total_memory >> 20, f"{gpu.major}.{gpu.minor}", "", "", sep=", ")
"""


@dataclass(frozen=True)
class Machine:
    """The device of one rank; None is unknown."""

    kind: Literal["gpu", "cpu"]
    name: str
    memory: int | None = None  # bytes
    capability: tuple[int, int] | None = None  # CUDA compute capability: (9, 0) is Hopper
    source: Literal["nvidia-smi", "torch"] | None = None

    @property
    def is_blackwell(self) -> bool:
        return self.capability is not None and self.capability[0] >= 10

    @property
    def default_backend(self) -> str:
        """The attention backend that suits the device."""
        major = 0 if self.capability is None else self.capability[0]
        return {8: "fa3", 9: "fa3", 10: "trtllm_mha", 12: "trtllm_mha"}.get(major, "flashinfer")


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


@dataclass(frozen=True)
class _Row:
    """One line of nvidia-smi."""

    machine: Machine
    uuid: str
    is_split: bool  # into MIG instances, whose memory only torch reads


def find_gpu(base_gpu_id: int = 0) -> Machine | None:
    """Return the NVIDIA GPU that a server's first rank will use; None without a driver or a GPU.

    nvidia-smi is fast, but many containers lack it, and it reports neither the memory of integrated GPUs nor that of
    MIG instances. It ignores ``CUDA_VISIBLE_DEVICES``, into which ``base_gpu_id`` is an index. If its answer is
    ambiguous or late, torch is queried.
    """
    command = shutil.which("nvidia-smi")
    rows = parse(_answer(command, *_QUERY)) if command else []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = _select(rows, visible, base_gpu_id)
    if found is not None and found.machine.memory is not None and not found.is_split:
        return replace(found.machine, source="nvidia-smi")
    asks = bool(rows) or _DRIVER.exists()
    by_torch = parse(_answer(sys.executable, "-c", _ASK_TORCH, str(base_gpu_id))) if asks else []
    if by_torch:
        return replace(by_torch[0].machine, source="torch")
    if found is not None:
        return replace(found.machine, memory=None, source="torch")
    return replace(UNKNOWN_GPU, source="torch") if rows and visible != "" else None


def _select(rows: list[_Row], visible: str | None, index: int) -> _Row | None:
    # CUDA counts the fastest GPU first, nvidia-smi goes by the PCI bus: the order matters if GPUs differ.
    entries = (
        [each.strip() for each in visible.split(",")] if visible is not None else [str(i) for i in range(len(rows))]
    )
    entry = entries[index] if index < len(entries) else ""
    if entry.startswith("GPU-"):
        return next((row for row in rows if row.uuid.startswith(entry)), None)
    if not re.fullmatch("[0-9]{1,4}", entry) or int(entry) >= len(rows):
        return None
    are_alike = len({(row.machine, row.is_split) for row in rows}) == 1
    if are_alike or os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return rows[int(entry)]
    return None


def _answer(*command: str) -> str:
    try:
        asked = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return ""
    try:
        answer, _ = asked.communicate(timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        asked.kill()  # without waiting: a process that hangs in the driver does not end
        return ""
    return answer if asked.returncode == 0 else ""


def parse(answer: str) -> list[_Row]:
    """Parse lines of name, memory in MiB, compute capability, UUID and MIG mode; a number may be ``[N/A]``."""
    return [_row(*line.rsplit(",", 4)) for line in answer.splitlines() if line.count(",") >= 4]


def _row(*columns: str) -> _Row:
    name, memory, capability, uuid, mig = (part.strip() for part in columns)
    major, _, minor = capability.partition(".")
    known = all(re.fullmatch("[0-9]{1,3}", each) for each in (major, minor or "0"))
    machine = Machine(
        "gpu",
        name,
        int(memory) * MIB if re.fullmatch("[0-9]{1,9}", memory) else None,
        (int(major), int(minor or 0)) if known else None,
    )
    return _Row(machine, uuid, is_split=mig == "Enabled")


def asked_about(
    device: str | None, memory_gib: float | None, gpu: str | None = None, *, base_gpu_id: int = 0
) -> Machine:
    """Return the machine that a command line names: a known GPU, one with ``memory_gib`` GiB, or this machine.

    Args:
        device: ``--device``; ``"cpu"`` is the CPU platform.
        gpu: a name in :data:`GPUS`, in any case; decides alone.

    Raises:
        DFlashError: no such GPU, or no such memory.
    """
    if gpu is not None:
        if gpu.lower() not in GPUS:
            remedy = "state the GPU's memory instead: --memory-gib 80"
            raise DFlashError(f"--gpu {gpu}", expected=f"one of {', '.join(GPUS)}", remedy=remedy)
        return GPUS[gpu.lower()]
    if memory_gib is not None:
        if not 0 < memory_gib < _MOST_GIB:
            raise DFlashError(f"--memory-gib {memory_gib}", expected=f"up to {_MOST_GIB}", remedy="correct it")
        asked = CPU if device == "cpu" else UNKNOWN_GPU
        return replace(asked, name=f"a {asked.kind.upper()} with {memory_gib:g} GiB", memory=int(memory_gib * GIB))
    if device == "cpu":
        return CPU
    return find_gpu(base_gpu_id) or (UNKNOWN_GPU if device else CPU)
