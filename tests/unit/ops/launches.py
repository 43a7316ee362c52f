"""What Triton would compile for a call of a kernel's launcher: the call is recorded, on tensors without storage."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.runtime.jit import create_function_from_signature

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Launch:
    """One launch: its grid, and the arguments' types, constants and alignments that Triton compiles for."""

    kernel: Any
    grid: Shape
    args: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def variant(self) -> tuple[Any, ...]:
        """Launches of a kernel that are equal in this share one compilation."""
        bind = create_function_from_signature(self.kernel.signature, self.kernel.params, CUDABackend)
        bound, specialization, options = bind(*self.args, **self.options)
        return bound, tuple(specialization), options

    @property
    def key(self) -> str:
        _, specialization, options = self.variant
        return f"{specialization} {options}"

    def compile(self, capability: int) -> Any:
        target = GPUTarget("cuda", capability, 32)
        bound, specialization, options = self.variant
        parsed, signature, constexprs, attrs = self.kernel._pack_args(
            CUDABackend(target), options, bound, specialization, options
        )
        return triton.compile(
            ASTSource(self.kernel, signature, constexprs, attrs), target=target, options=parsed.__dict__
        )


def record(name: str, *args: Any, **kwargs: Any) -> Launch:
    """Call the launcher of kernel ``name``; tensors given as shapes and dtypes by :func:`tensor`."""
    module = importlib.import_module(f"sglang_dflash.ops.kernels.{name}")
    whole, launches = getattr(module, f"{name}_kernel"), []

    class Recorder:
        def __getitem__(self, grid: Shape) -> Callable[..., None]:
            return lambda *args, **options: launches.append(Launch(whole, grid, args, options))

    setattr(module, whole.__name__, Recorder())
    try:
        getattr(module, name)(*args, **kwargs)
    finally:
        setattr(module, whole.__name__, whole)
    [launch] = launches
    return launch


def tensor(*shape: int, dtype: torch.dtype = torch.int64, skipped: int = 0) -> Tensor:
    """Without storage; its address is not aligned if ``skipped`` first entries are cut off."""
    return torch.empty(shape[0] + skipped, *shape[1:], dtype=dtype, device="meta")[skipped:]
