"""Make ``import torchvision`` work beside a CPU build of torch.

SGLang imports torchvision unconditionally. The wheel on the public index is built against CUDA: its extension cannot be
loaded without CUDA's libraries, so ``torchvision::nms`` is never defined and the import dies while registering a fake
kernel for it. Declaring the operators (no kernel: nothing here calls them) lets the import pass; its transforms, which
are what image processors use, are plain Python. A torchvision whose extension loads is left alone.

The cure has to come before the first import of torchvision, by whoever makes it, so it is a one-shot import hook:
installed by our platform module (``import sglang`` imports that first) and, for programs that import transformers
before SGLang, by a ``.pth`` file that ``make setup`` writes into the environment.
"""

from __future__ import annotations

import importlib.abc
import sys
import sysconfig
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

PTH_NAME = "sglang_dflash_torchvision.pth"
_OPERATORS = ("nms", "qnms")
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_library: object | None = None  # torch drops the operators together with the Library object that defined them


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Declares the operators when torchvision is about to be imported, then steps aside."""

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
        except OSError:  # linked against CUDA libraries that are not here
            continue
    global _library
    _library = fragment = library.Library("torchvision", "FRAGMENT")
    for name in _OPERATORS:
        fragment.define(name + _SCHEMA)


def install() -> None:
    """Arm the import hook; does nothing once torchvision is imported, the hook armed or the operators declared."""
    # A mere look for torchvision (``find_spec``) declares the operators without importing it.
    armed = any(isinstance(finder, _BeforeTorchvision) for finder in sys.meta_path)
    if armed or _library is not None or "torchvision" in sys.modules:
        return
    sys.meta_path.insert(0, _BeforeTorchvision())


def write_pth() -> Path:
    """Write the ``.pth`` file that arms the hook at the start of every interpreter of this environment."""
    path = Path(sysconfig.get_path("purelib")) / PTH_NAME
    path.write_text("import sglang_dflash_cpu.torchvision_import as hook; hook.install()\n")
    return path


if __name__ == "__main__":
    print(write_pth())
