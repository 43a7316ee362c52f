"""Make ``import torchvision`` work with a CPU build of torch.

SGLang imports torchvision unconditionally. The wheel on the public index needs CUDA's libraries: without them its
extension does not load, ``torchvision::nms`` is never defined, and the import fails. Declaring the operators without a
kernel lets it pass. Nothing calls them: image processors use torchvision's transforms, which are plain Python.

The operators must be declared before the first import, so this is a one-shot import hook: installed by the platform
module (``import sglang`` imports that first) and, for programs that import transformers first, by a ``.pth`` file that
``make setup`` writes into the environment.
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
_library: object | None = None  # torch drops the operators together with the Library object that defined them


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
        except OSError:  # linked against CUDA libraries that are not installed
            continue
    global _library
    _library = fragment = library.Library("torchvision", "FRAGMENT")
    for name in _OPERATORS:
        fragment.define(name + _SCHEMA)


def install() -> None:
    """Install the import hook, unless torchvision is imported, the hook installed or the operators declared."""
    # A search for torchvision (``find_spec``) declares the operators without importing it.
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
