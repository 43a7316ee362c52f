"""SGLang's platform discovery."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path

from sglang_dflash.errors import DFlashError
from sglang_dflash.plugin import load_before_resolution

logger = logging.getLogger(__name__)

PLATFORM_NAME = "dflash_cpu"
PLATFORM_CLASS = "sglang_dflash_cpu.platform.DFlashCpuPlatform"
PLATFORM_GROUP = "sglang.srt.platforms"
NO_PLATFORM = "dflash"  # entry point of sglang-dflash, which loads plugins early

# Kernel drivers create these, with or without support in torch.
_DEVICE_NODES = {"CUDA": "/dev/nvidiactl", "ROCm": "/dev/kfd", "NPU": "/dev/davinci_manager", "MUSA": "/dev/mtgpu.0"}


def accelerators() -> list[str]:
    import torch

    usable = {
        "ROCm" if torch.version.hip else "CUDA": torch.cuda.is_available(),
        "XPU": torch.xpu.is_available(),
        "NPU": importlib.util.find_spec("torch_npu") is not None,
        "MUSA": getattr(torch.version, "musa", None) is not None,
        "MPS": torch.mps.is_available(),
    }
    return [kind for kind in usable if usable[kind]]


def unused_devices(env: Mapping[str, str] = os.environ) -> list[str]:
    """Return the kinds of accelerator whose driver is loaded, unless the user hides the devices."""
    hidden = {
        "CUDA": env.get("CUDA_VISIBLE_DEVICES") in ("", "-1"),
        "ROCm": "" in (env.get("HIP_VISIBLE_DEVICES"), env.get("ROCR_VISIBLE_DEVICES")),
    }
    return [kind for kind, node in _DEVICE_NODES.items() if Path(node).exists() and not hidden.get(kind)]


def other_platform_plugins() -> list[str]:
    """Return the platform plugins of other packages; SGLang accepts one active platform."""
    own = PLATFORM_NAME, NO_PLATFORM
    return [point.name for point in entry_points(group=PLATFORM_GROUP) if point.name not in own]


def reason_to_stay_out(
    env: Mapping[str, str], *, usable: list[str], unused: list[str], others: list[str]
) -> str | None:
    """Return why the CPU platform must not be active, or None.

    Args:
        usable, unused: accelerators that torch can use, and those with a loaded driver only.
        others: other installed platform plugins.
    """
    chosen = env.get("SGLANG_PLATFORM")
    if chosen and chosen != PLATFORM_NAME:
        return f"SGLANG_PLATFORM={chosen}"
    if usable:
        return f"{' and '.join(usable)} available"
    if chosen == PLATFORM_NAME:
        return None
    if env.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return "SGLANG_USE_CPU_ENGINE=1 selects SGLang's own CPU engine"
    if unused:
        return f"a {' and '.join(unused)} device is present but this torch cannot use it"
    if others:
        return f"another platform plugin is installed: {', '.join(others)}"
    return None


def activate() -> str | None:
    """Return the dotted path of the platform class, or None; entry point of SGLang's discovery.

    Raises:
        DFlashError: ``SGLANG_PLATFORM=dflash_cpu`` on a machine with an accelerator.
        ImportError: SGLang lacks a name that the platform needs. SGLang logs it and continues.
    """
    usable = accelerators()
    reason = reason_to_stay_out(os.environ, usable=usable, unused=unused_devices(), others=other_platform_plugins())
    if reason is None:
        if os.environ.get("SGLANG_PLATFORM"):  # SGLang calls no other package's entry point
            load_before_resolution()
        # SGLang imports the class next; an error there would break ``import sglang``.
        importlib.import_module(PLATFORM_CLASS.rpartition(".")[0])
        return PLATFORM_CLASS
    if os.environ.get("SGLANG_PLATFORM") == PLATFORM_NAME:
        raise DFlashError(
            f"SGLANG_PLATFORM={PLATFORM_NAME} on a machine with {reason}",
            remedy='unset SGLANG_PLATFORM to use the accelerator, or hide it (CUDA_VISIBLE_DEVICES="")',
        )
    log = logger.warning if "cannot use it" in reason else logger.info
    log("sglang-dflash: CPU platform not activated: %s", reason)
    return None


def is_active() -> bool:
    from sglang.srt.platforms import current_platform

    return type(current_platform).__qualname__ == PLATFORM_CLASS.rpartition(".")[2]
