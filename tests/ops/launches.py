"""Compile a launcher's kernels for an absent GPU: tensors without storage, launches without a device.

Triton's own warm-up decides what is compiled and which launches share a compilation; only its driver is replaced.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas_version
from triton.runtime import driver
from triton.runtime.jit import JITFunction

CUDA = torch.device("cuda", 0)
# Bytes that one block of threads may request, with the opt-in that Triton makes, by architecture (90 for sm_90).
SHARED_MEMORY = {86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 110: 232_448, 120: 101_376, 121: 101_376}
CARDS = (90, 100, 120)  # one of each generation of the published cards' GPUs


@dataclass(frozen=True)
class Usage:
    """Registers and stack bytes (spills) per thread, shared memory bytes per block."""

    registers: int
    stack: int
    shared: int


@dataclass(frozen=True)
class Launch:
    """One launch: the kernel's name, its grid, and Triton's compilation."""

    kernel: str
    grid: Any
    compiled: Any

    @property
    def key(self) -> str:
        return str(self.compiled.hash)

    @property
    def usage(self) -> Usage:
        return _usage(self.compiled)


class OnCuda(TorchFunctionMode):
    """Create tensors of a CUDA device without storage (PyTorch's ``meta``), which report that device."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        getter_of = getattr(function, "__self__", None)
        if getter_of is Tensor.is_cuda:
            return args[0].is_meta
        if getter_of is Tensor.device and args[0].is_meta:
            return CUDA
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "meta"
        return function(*args, **kwargs)


@contextmanager
def _assembling_with(ptxas: str | None) -> Iterator[None]:
    with patch.dict(os.environ):
        for name in ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"):  # FlashInfer sets the second
            os.environ.pop(name, None)
        if ptxas:
            os.environ["TRITON_PTXAS_BLACKWELL_PATH"] = ptxas
        get_ptxas_version.cache_clear()  # part of the key of Triton's cache on disk
        yield
    get_ptxas_version.cache_clear()


@contextmanager
def compiled_for(capability: int, ptxas: str | None = None) -> Iterator[list[Launch]]:
    """Collect the launches inside, compiled for ``capability`` (90 for sm_90).

    Args:
        ptxas: the assembler for Blackwell; None for Triton's own.
    """
    launches: list[Launch] = []
    device = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: (capability, ptxas),  # Triton keeps its compiled kernels by device
        get_current_stream=lambda device=None: 0,
        utils=SimpleNamespace(get_device_properties=lambda device: {"multiprocessor_count": 132}),
    )
    run, before = JITFunction.run, driver._active

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled = run(self, *args, grid=grid, warmup=True, **kwargs)
        launches.append(Launch(self.fn.__name__, grid, compiled))
        return compiled

    driver.set_active(device)
    JITFunction.run = compile_only
    try:
        cuda = patch("torch.cuda.get_device_properties", lambda device: SimpleNamespace(L2_cache_size=50 << 20))
        with OnCuda(), _assembling_with(ptxas), cuda:
            yield launches
    finally:
        JITFunction.run, driver._active = run, before


def first_calls(target: Any, step: Callable[..., None], with_patch: Any) -> None:
    """Run the dummy steps of a start, which ``step`` launches, with snapshots and without; nothing else of it."""
    from sglang_dflash.worker.start import prewarm
    from tests.support.configs import serving_plan

    mamba, nothing = SimpleNamespace(enable_mamba_extra_buffer=True), lambda *_, **__: None
    for owner, name, value in (
        (prewarm, "get_exec", lambda: SimpleNamespace(mamba=mamba)),
        (prewarm, "get_schedule", lambda: SimpleNamespace(page_size=1)),
        (prewarm, "mamba_track_grid", lambda page: 256),
        (prewarm, "runs_kernels", lambda tensor: True),
        (prewarm, "sample", nothing),
        *((prewarm.FirstCalls, name, nothing) for name in ("_penalize", "_slots", "_state_slots")),
        (torch, "get_device_module", lambda device: SimpleNamespace(synchronize=nothing)),
    ):
        with_patch.setattr(owner, name, value)
    inject: Any = None
    prewarm.FirstCalls(serving_plan(), target, inject, step).run((16,), lambda width: nullcontext())


def tensor(*shape: int, dtype: torch.dtype = torch.int64, skipped: int = 0) -> Tensor:
    """On the device; its address is not aligned if ``skipped`` first entries are cut off."""
    return torch.empty(shape[0] + skipped, *shape[1:], dtype=dtype, device=CUDA)[skipped:]


@cache
def _usage(compiled: Any) -> Usage:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(compiled.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(cubin)]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    [line] = [line for line in listing.splitlines() if "REG:" in line]
    used = {name: int(value) for name, value in re.findall(r"(\w+):(\d+)", line)}
    return Usage(used["REG"], used["STACK"] + used["LOCAL"], max(used["SHARED"], compiled.metadata.shared))


def interpreted(*files: str) -> None:
    """Run files of ``tests`` under Triton's interpreter: in a separate process, as Triton decides at import."""
    paths = (str(Path(__file__).parents[1] / file) for file in files)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *paths],
        env={**os.environ, "TRITON_INTERPRET": "1", "OPS_DEVICE": "cpu"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0 and " passed" in run.stdout and "skipped" not in run.stdout, run.stdout + run.stderr
