"""What the ``sitecustomize`` of :mod:`tools.gpu.unpack` does first in every process of the kit."""

from __future__ import annotations

import os


def install() -> None:
    from sglang_dflash_cpu import torchvision_import

    torchvision_import.install()
    if folder := os.environ.get("GPU_KIT_RECORD"):
        from tools import record_imports

        record_imports.start(folder)
    if os.environ.get("GPU_KIT_DEVICE") == "fake":
        from tools.gpu import fake_device

        fake_device.install()
