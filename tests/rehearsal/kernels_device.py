"""A process in which SGLang believes that it runs on a GPU: its launchers choose tiles and options by what they find.

For processes that only compile; nothing here is undone. Each line says what it stands for. Together they hide which
backends SGLang would choose by what is installed, and every kernel that is not Triton's.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from triton.runtime import driver
from triton.runtime.autotuner import Autotuner

from tests.ops.launches import SHARED_MEMORY

_MULTIPROCESSORS = {90: 132, 100: 148, 120: 170}


def pretend(capability: int) -> None:
    """Before the first import of SGLang: the device is one of ``capability``."""
    properties = SimpleNamespace(
        name="NVIDIA H-or-B", major=capability // 10, minor=capability % 10,
        multi_processor_count=_MULTIPROCESSORS[capability], total_memory=80 << 30,
    )  # fmt: skip
    torch.version.cuda = "13.0"  # a CUDA build of PyTorch
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda device=None: (properties.major, properties.minor)
    torch.cuda.get_device_name = lambda device=None: properties.name
    torch.cuda.get_device_properties = lambda device=None: properties
    torch.cuda.device = lambda device: nullcontext()  # type: ignore[assignment, misc]  # launchers enter the tensor's
    sys.meta_path.append(_CompiledKernels())
    Autotuner.run = _first_config
    driver.set_active(  # FLA asks at import
        SimpleNamespace(
            get_current_target=lambda: SimpleNamespace(backend="cuda", arch=capability, warp_size=32),
            get_current_device=lambda: capability,
            utils=SimpleNamespace(
                get_device_properties=lambda index: {
                    "multiprocessor_count": _MULTIPROCESSORS[capability], "max_shared_mem": SHARED_MEMORY[capability],
                }
            ),
        )
    )  # fmt: skip


class _CompiledKernels(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """``sgl_kernel``, SGLang's compiled kernels: names that can be imported and do nothing."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "sgl_kernel":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Anything(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


def _first_config(self: Any, *args: Any, **kwargs: Any) -> None:
    """On a device the autotuner times its configurations; here the first that survives pruning is compiled."""
    self.nargs = dict(zip(self.arg_names, args, strict=False))
    self.fn.run(*args, **kwargs, **self.prune_configs(kwargs)[0].all_kwargs())
    self.nargs = None
