"""Make ``import torchvision`` work with a CPU build of torch.

SGLang always imports torchvision. Without CUDA libraries the public wheel does not define ``torchvision::nms``, and the
import fails. This module declares the operators without a kernel; nothing calls them. A one-shot import hook of the
platform, or a ``.pth`` file of ``make setup``, declares them before the first import.
"""

from __future__ import annotations

import importlib.abc
import sys
import sysconfig
from argparse import ArgumentParser
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

PTH_NAME = "sglang_dflash_torchvision.pth"
_OPERATORS = ("nms", "qnms")
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_library: object | None = None  # torch drops the operators together with this Library object


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Declare the operators when torchvision is about to be imported, then remove itself."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            spec = PathFinder.find_spec(fullname, path)
            if spec is not None and spec.submodule_search_locations:
                _declare_operators(Path(spec.submodule_search_locations[0]))
        return None


def _declare_operators(package: Path) -> None:
    import torch
    from torch import library

    for extension in package.glob("_C*.so"):
        try:
            torch.ops.load_library(str(extension))
            return
        except OSError:  # linked against missing CUDA libraries
            continue
    global _library
    _library = fragment = library.Library("torchvision", "FRAGMENT")
    for name in _OPERATORS:
        fragment.define(name + _SCHEMA)


def install() -> None:
    # ``find_spec`` of torchvision declares the operators without importing it.
    installed = any(isinstance(finder, _BeforeTorchvision) for finder in sys.meta_path)
    if installed or _library is not None or "torchvision" in sys.modules:
        return
    sys.meta_path.insert(0, _BeforeTorchvision())


def write_pth() -> Path:
    """Write the ``.pth`` file that installs the hook in every interpreter of this environment."""
    path = Path(sysconfig.get_path("purelib")) / PTH_NAME
    path.write_text("import sglang_dflash_cpu.torchvision_import as hook; hook.install()\n")
    return path


if __name__ == "__main__":
    ArgumentParser(description=__doc__).parse_args()
    print(write_pth())
