"""The device that serves a pair."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from sglang_dflash.errors import DFlashError
from sglang_dflash.launch.device import CPU, UNKNOWN_GPU, Device

MIB = 1 << 20
GIB = 1 << 30
_MAX_GIB = 1 << 20
_SECONDS = 60
_AMD = ("mi", "radeon", "instinct")  # how names begin
_DRIVER = Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/dev/kfd")  # NVIDIA on Linux and in WSL, AMD
_ASK_TORCH = """
import json, sys
from dataclasses import asdict
from sglang_dflash.launch.device import local_gpu
print(json.dumps(asdict(local_gpu(int(sys.argv[1])))))
"""


def _gpu(name: str, mib: int, capability: tuple[int, int], *, unified: bool = False) -> Device:
    return Device("gpu", f"NVIDIA {name}", mib * MIB, capability, is_unified=unified)


# Compute capability: https://developer.nvidia.com/cuda-gpus. Memory by nvidia-smi:
# https://thundergolfer.com/blog/nvidia-gpu-memory-capacity, or the line's link.
GPUS = {
    "rtx3090": _gpu("GeForce RTX 3090", 24_576, (8, 6)),
    "rtx4090": _gpu("GeForce RTX 4090", 24_564, (8, 9)),  # https://github.com/vllm-project/vllm/issues/7553
    "rtx5090": _gpu("GeForce RTX 5090", 32_607, (12, 0)),  # https://github.com/noonghunna/club-3090/issues/1261
    "a6000": _gpu("RTX A6000", 49_140, (8, 6)),  # without ECC
    "l40s": _gpu("L40S", 46_068, (8, 9)),
    "rtx-pro-6000": _gpu("RTX PRO 6000 Blackwell", 97_887, (12, 0)),  # https://github.com/antirez/ds4/issues/431
    "a100": _gpu("A100-SXM4-80GB", 81_920, (8, 0)),
    "h100": _gpu("H100 80GB HBM3", 81_559, (9, 0)),
    "h200": _gpu("H200", 143_771, (9, 0)),
    "b200": _gpu("B200", 183_359, (10, 0)),  # https://github.com/NVIDIA/TensorRT-LLM/issues/10278
    "b300": _gpu("B300 SXM6 AC", 275_040, (10, 3)),
    "gb300": _gpu("GB300", 284_208, (10, 3)),
    # from torch: https://github.com/MiaAI-Lab/GLM-5.3-Flash-EXL3-2x-DGX-Sparks/issues/47
    "dgx-spark": _gpu("GB10", 124_611, (12, 1), unified=True),
}


def find_gpu(base_gpu_id: int = 0) -> Device | None:
    """Return the GPU of a server's first rank; None without a driver, unknown if torch cannot use it.

    A separate process reads it: after CUDA is initialised, a process cannot fork others that use CUDA.
    """
    if not any(path.exists() for path in _DRIVER):
        return None
    command = [sys.executable, "-c", _ASK_TORCH, str(base_gpu_id)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        answer, _ = child.communicate(timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()  # do not wait: a process that hangs in the driver does not end
    if child.returncode != 0:
        return replace(UNKNOWN_GPU, is_local=True)
    found = json.loads(answer)
    return Device(**{**found, "capability": found["capability"] and tuple(found["capability"])})


def gpu_named(name: str) -> Device:
    """Return the GPU of a name in :data:`GPUS` or of its end, such as ``4090``; DFlashError for any other name."""
    wanted = _plain(name)
    exact = [device for key, device in GPUS.items() if _plain(key) == wanted]
    names = {key: (_plain(key), _plain(device.name)) for key, device in GPUS.items() if wanted}
    ends = {key: GPUS[key] for key, each in names.items() if any(name.endswith(wanted) for name in each)}
    found = exact or [*ends.values()]
    if len(found) != 1:
        amd = wanted.removeprefix("amd").startswith(_AMD)
        unknown = "is AMD's, where SGLang's own worker serves DFLASH" if amd else "is no GPU that is known here"
        value = f"--gpu {name} {'may be ' + ' or '.join(ends) if ends else unknown}"
        raise DFlashError(value, remedy=f"name one of {', '.join(GPUS)}; add --memory-gib for another size")
    return found[0]


def _plain(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


def asked_about(
    device: str | None, memory_gib: float | None, gpu: str | None = None, *, base_gpu_id: int = 0
) -> Device:
    """Return the device that a command line names; DFlashError for an unknown GPU or an invalid size.

    Args:
        device: ``--device``; ``"cpu"`` is the CPU platform.
        memory_gib: overrides the named GPU's memory; without a name, a Hopper GPU's.
        gpu: as of :func:`gpu_named`.
    """
    named = gpu_named(gpu) if gpu is not None else CPU if device == "cpu" else None
    if memory_gib is None:
        return named or find_gpu(base_gpu_id) or (UNKNOWN_GPU if device else CPU)
    if not 0 < memory_gib < _MAX_GIB:
        raise DFlashError(f"--memory-gib {memory_gib}", remedy=f"name a size up to {_MAX_GIB}")
    name = f"{named.name if named else 'a GPU (sm_90 assumed)'} with {memory_gib:g} GiB"
    return replace(named or GPUS["h100"], name=name, memory=int(memory_gib * GIB))
