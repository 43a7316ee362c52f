"""What stands in for a device, one row each: what it is, what it stands for and what it therefore hides.

``python -m tests.rehearsal.stubs`` prints the list.
"""

from __future__ import annotations

import contextlib
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from tabulate import tabulate

from tests.rehearsal import report
from tests.rehearsal.emulator import Graph, captured_by
from tests.support.probability import top_k_renorm_prob, top_p_renorm_prob


@dataclass(frozen=True)
class Stub:
    """One stand-in.

    Attributes:
        path: dotted path of what it replaces.
        value: the stand-in.
        stands_for: what a device has there.
        hides: what no rehearsal can therefore show.
    """

    path: str
    value: Any
    stands_for: str
    hides: str


class Event:
    """Every event has happened as soon as it is recorded: there is one stream."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


# Modules that choose a kernel, or refuse a tensor, by the tensor's device: to them every tensor is on the GPU.
ON_THE_GPU = {
    "sglang.kernels.ops.attention.triton_gdn_fused_proj",
    "sglang.kernels.ops.kvcache.kv_read_table",
    "sglang.kernels.ops.mamba.mamba_state_scatter_triton",
    "sglang_dflash.model.attention",
    "sglang_dflash.ops.dispatch",
}
_is_cpu = torch.Tensor.is_cpu.__get__  # type: ignore[attr-defined]


def _asked_from_the_gpu() -> bool:
    return sys._getframe(2).f_globals.get("__name__") in ON_THE_GPU


def _nothing() -> Callable[..., None]:
    """A function of its own for each: torch's compiler tells its special functions apart by identity."""
    return lambda *args, **kwargs: None


def _memory_stats(device: Any = None) -> dict[str, int]:
    return {"reserved_bytes.all.current": 0, "reserved_bytes.all.peak": 0}


_PROPERTIES = SimpleNamespace(name="rehearsal", major=9, minor=0, multi_processor_count=4, total_memory=8 << 30)
_MEMORY = "the device's allocator"
_NO_ALLOCATOR = "fragmentation, out of memory"

STUBS: tuple[Stub, ...] = (
    Stub("sglang_dflash.hooks.takeover.on_our_cpu_platform", lambda: True, 'the device "cuda"', "nothing"),
    Stub(
        "sglang_dflash.hooks.launch.reason_for_builtin",
        lambda *_, on_cpu: None,
        'the device "cuda"',
        "nothing",
    ),
    Stub(
        "torch.Tensor.is_cuda",
        property(lambda tensor: _asked_from_the_gpu()),
        "a tensor of the GPU, in the modules that rehearse",
        "host tensors among device tensors",
    ),
    Stub(
        "torch.Tensor.is_cpu",
        property(lambda tensor: not _asked_from_the_gpu() and _is_cpu(tensor)),
        "the same",
        "the same",
    ),
    Stub("torch.cuda.CUDAGraph", Graph, "a CUDA graph", "what the driver makes of one, and its speed"),
    *(
        stub
        for module in ("torch.cpu", "torch.cuda")
        for stub in (
            Stub(f"{module}.graph", captured_by, "its capture", "capture in a stream with others beside it"),
            Stub(f"{module}.graph_pool_handle", lambda: (0, 0), "the graphs' memory pool", "its addresses and size"),
            Stub(
                f"{module}.is_current_stream_capturing",
                lambda: Graph.capturing is not None,
                "the stream's state",
                "nothing",
            ),
            Stub(f"{module}.Event", Event, "an event", "order between streams (tests/rehearsal/streams.py has that)"),
            Stub(f"{module}.synchronize", _nothing(), "waiting for the device", "whoever waits too little"),
            Stub(f"{module}.empty_cache", _nothing(), _MEMORY, _NO_ALLOCATOR),
        )
    ),
    Stub(
        "sglang.srt.utils.triton_load_watch.mark_serving_started",
        report.started,
        "a watch over compilations under traffic",
        "nothing",
    ),
    Stub("torch.cuda.reset_peak_memory_stats", _nothing(), _MEMORY, _NO_ALLOCATOR),
    Stub("torch.cuda.memory_stats", _memory_stats, _MEMORY, _NO_ALLOCATOR),
    Stub(
        "torch.cuda.get_device_properties",
        lambda device=None: _PROPERTIES,
        "a GPU with 4 multiprocessors",
        "grids sized for a real one",
    ),
    *(
        Stub(f"sglang.srt.layers.sampler.{kernel.__name__}", kernel, "a CUDA kernel", "its rounding")
        for kernel in (top_k_renorm_prob, top_p_renorm_prob)
    ),
    Stub("torch.cpu.device", lambda index=None: contextlib.nullcontext(), "choosing a GPU", "several GPUs"),
    Stub(
        "sglang.kernels.ops.attention.fla.utils.custom_device_ctx",
        lambda index: contextlib.nullcontext(),
        "choosing a GPU",
        "several GPUs",
    ),
    Stub(
        "sglang.srt.model_executor.forward_batch_info.ForwardMode.is_cpu_graph",
        lambda mode: mode.is_cuda_graph(),
        "which forwards have graphs on a GPU",
        "nothing",
    ),
    Stub(
        "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph._is_stream_capturing",
        lambda stream: Graph.capturing is not None,
        "the CUDA runtime's answer for a stream",
        "side streams inside a capture",
    ),
)


def install(stubs: tuple[Stub, ...] = STUBS) -> None:
    """Put every stand-in in place, in this process."""
    for stub in stubs:
        owner, _, name = stub.path.rpartition(".")
        setattr(pkgutil.resolve_name(owner), name, stub.value)


if __name__ == "__main__":
    rows = [(f"`{stub.path}`", stub.stands_for, stub.hides) for stub in STUBS]
    print(tabulate(rows, headers=("stub", "stands for", "hides"), tablefmt="github"))
