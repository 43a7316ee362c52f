"""The device that serves, and why there is none."""

from dataclasses import dataclass
from typing import Literal

from sglang_dflash import __version__
from sglang_dflash.errors import DFlashError


@dataclass(frozen=True)
class Device:
    """The device of one rank. None means unknown."""

    kind: Literal["gpu", "cpu"]
    name: str
    memory: int | None = None  # bytes
    capability: tuple[int, int] | None = None  # CUDA's: (9, 0) is Hopper
    is_local: bool = False
    is_unified: bool = False  # whether host and device share the memory
    is_rocm: bool = False


CPU = Device("cpu", "a CPU")
UNKNOWN_GPU = Device("gpu", "an unknown GPU")


def local_gpu(index: int) -> Device:
    """Return a GPU of this machine; initialises CUDA in this process."""
    import torch

    gpu, is_rocm = torch.cuda.get_device_properties(index), torch.version.hip is not None
    return Device(
        "gpu",
        gpu.name,
        gpu.total_memory,
        None if is_rocm else (gpu.major, gpu.minor),
        is_local=True,
        is_unified=bool(gpu.is_integrated),
        is_rocm=is_rocm,
    )


def why_no_accelerator(name: str | None) -> DFlashError | None:
    """Return why torch can use no accelerator, with the fix, or None."""
    import torch

    if torch.accelerator.is_available():
        return None
    reason = "it finds none"
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:  # AssertionError: a build for CPUs
        reason = str(error).partition(". ")[0]
    value = f"torch {torch.__version__} cannot use {name or 'a GPU'}: {reason}"
    if cuda := torch.version.cuda:
        remedy = f"install an NVIDIA driver for CUDA {cuda} (CUDA 13: 580 or newer); in a container, pass `--gpus all`"
    elif name or torch.version.hip:
        remedy = "install a build of torch for this GPU, and the driver that it needs"
    else:
        value = "this machine has no accelerator that SGLang can use"
        remedy = f"for the CPU platform, run `pip install ./cpu_platform` in a checkout of sglang-dflash {__version__}"
    return DFlashError(value, remedy=remedy)
