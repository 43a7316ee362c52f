"""The machine that serves a pair: this one, as its driver describes it, or another that a user names."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from sglang_dflash.errors import DFlashError
from sglang_dflash.plan.device import CPU, UNKNOWN_GPU, Device

MIB = 1 << 20
GIB = 1 << 30
_MOST_GIB = 1 << 20
_SECONDS = 60  # to wait for the driver
_DRIVER = Path("/dev/nvidiactl"), Path("/dev/dxg")  # of NVIDIA's driver, on Linux and in WSL
_ASK_TORCH = """
import sys, torch
gpu = torch.cuda.get_device_properties(int(sys.argv[1]))
print(gpu.name, gpu.total_memory, gpu.major, gpu.minor, sep="\\n")
"""

# Memory as nvidia-smi reports it, which is neither the GB nor the GiB of a data sheet: https://thundergolfer.com/blog/
# nvidia-gpu-memory-capacity for Hopper, https://github.com/NVIDIA/TensorRT-LLM/issues/10278 for the B200. Compute
# capability from https://developer.nvidia.com/cuda-gpus.
GPUS = {
    "h100": Device("gpu", "NVIDIA H100 80GB HBM3", 81_559 * MIB, (9, 0)),
    "h200": Device("gpu", "NVIDIA H200", 143_771 * MIB, (9, 0)),
    "b200": Device("gpu", "NVIDIA B200", 183_359 * MIB, (10, 0)),
}


def find_gpu(base_gpu_id: int = 0) -> Device | None:
    """Return the NVIDIA GPU that a server's first rank will use; None without a driver, unknown if torch cannot use it.

    Torch is asked in a separate process, because a process that has initialised CUDA cannot fork others that use it.
    """
    if not any(path.exists() for path in _DRIVER):
        return None
    command = [sys.executable, "-c", _ASK_TORCH, str(base_gpu_id)]
    asked = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        answer, _ = asked.communicate(timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        asked.kill()  # without waiting: a process that hangs in the driver does not end
    if asked.returncode != 0:
        return replace(UNKNOWN_GPU, is_local=True)
    name, *numbers = answer.splitlines()
    memory, major, minor = map(int, numbers)
    return Device("gpu", name, memory, (major, minor), is_local=True)


def asked_about(
    device: str | None, memory_gib: float | None, gpu: str | None = None, *, base_gpu_id: int = 0
) -> Device:
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
