"""What stands in for a device, by the dotted path that it replaces, and what each therefore hides."""

from __future__ import annotations

import contextlib
import os
import pkgutil
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from tests.rehearsal import report
from tests.rehearsal.emulator import Graph, captured_by


class Event(torch.cpu.Event):  # type: ignore[misc]
    """An event that has happened as soon as it is recorded: there is one stream."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def elapsed_time(self, other: Any) -> float:
        return 0.0


# Modules that choose a kernel, or refuse a tensor, by the tensor's device: for them every tensor is on the GPU.
ON_THE_GPU = {
    "sglang.kernels.ops.attention.triton_gdn_fused_proj",
    "sglang.kernels.ops.kvcache.kv_read_table",
    "sglang.kernels.ops.mamba.mamba_state_scatter_triton",
    "sglang.srt.batch_invariant_ops.batch_invariant_ops",
    "sglang_dflash.model.attention",
    "sglang_dflash.ops",
}
_is_cpu = torch.Tensor.is_cpu.__get__  # type: ignore[attr-defined]


def _called_from_the_gpu() -> bool:
    return sys._getframe(2).f_globals.get("__name__") in ON_THE_GPU


def _nothing() -> Callable[..., None]:
    """Return a new function each time: torch's compiler distinguishes its special functions by identity."""
    return lambda *args, **kwargs: None


_RESERVED = ("reserved_bytes.all.current", "reserved_bytes.all.peak")
_PROPERTIES = SimpleNamespace(
    name="rehearsal", major=9, minor=0, multi_processor_count=4, total_memory=8 << 30, is_integrated=0
)

STUBS: dict[str, Any] = {
    # The device "cuda".
    "sglang_dflash.hooks.takeover.on_our_cpu_platform": lambda: True,
    "sglang_dflash.hooks.launch.reason_for_builtin": lambda *_: os.environ.get("REHEARSE_BUILTIN"),  # of the kit
    # A tensor on the GPU, in the modules above. Hides host tensors among device tensors.
    "torch.Tensor.is_cuda": property(lambda tensor: _called_from_the_gpu()),
    "torch.Tensor.is_cpu": property(lambda tensor: not _called_from_the_gpu() and _is_cpu(tensor)),
    # A CUDA graph. Hides what the driver makes of one, and its speed.
    "torch.cuda.CUDAGraph": Graph,
    **{
        f"{module}.{name}": stub
        for module in ("torch.cpu", "torch.cuda")
        for name, stub in {
            # A capture and its state. Hides other streams during a capture.
            "graph": captured_by,
            "is_current_stream_capturing": lambda: Graph.capturing is not None,
            # The graphs' memory pool. Hides its addresses and size.
            "graph_pool_handle": lambda: (0, 0),
            # Events and waits. Hide the order between streams (tests/rehearsal/streams.py has that) and missing waits.
            "Event": Event,
            "synchronize": _nothing(),
            # The device's allocator, here and below. Hides fragmentation and out of memory.
            "empty_cache": _nothing(),
        }.items()
    },
    "torch.cuda.reset_peak_memory_stats": _nothing(),
    "torch.cuda.memory_stats": lambda device=None: dict.fromkeys(_RESERVED, 0),
    # A watch over compilations under traffic.
    "sglang.srt.utils.triton_load_watch.mark_serving_started": report.started,
    # A GPU with 4 multiprocessors. Hides grids sized for a real one.
    "torch.cuda.get_device_properties": lambda device=None: _PROPERTIES,
    # Deterministic inference replaces operators of CUDA tensors; its grids have a program per multiprocessor.
    "sglang.srt.batch_invariant_ops.batch_invariant_ops.get_dispatch_device_backend": lambda: "CPU",
    "sglang.srt.batch_invariant_ops.batch_invariant_ops.get_device_core_count": lambda device=0: 4,
    # Choosing a GPU. Hides several GPUs.
    "torch.cpu.device": lambda index=None: contextlib.nullcontext(),
    "sglang.kernels.ops.attention.fla.utils.custom_device_ctx": lambda index: contextlib.nullcontext(),
    # Which forwards have graphs on a GPU.
    "sglang.srt.model_executor.forward_batch_info.ForwardMode.is_cpu_graph": lambda mode: mode.is_cuda_graph(),
    # The CUDA runtime's answer for a stream. Hides side streams inside a capture.
    "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph._is_stream_capturing": (
        lambda stream: Graph.capturing is not None
    ),
}
# Absent where there is no GPU.
_ONLY_ON_A_GPU = "torch.cpu."


def install() -> None:
    """Put every stand-in in place, in this process.

    Raises:
        AssertionError: a stand-in replaces nothing.
    """
    for path, stub in STUBS.items():
        owner, _, name = path.rpartition(".")
        place = pkgutil.resolve_name(owner)
        assert path.startswith(_ONLY_ON_A_GPU) or hasattr(place, name), f"{path} does not exist"
        setattr(place, name, stub)
