"""A CUDA device, faked: ``torch.cuda`` answers like a GPU, and what is put on it lives in host memory.

SGLang and this package then take their CUDA branches on a machine that has none, with Triton's kernels interpreted
(TRITON_INTERPRET=1), CUDA graphs emulated as in the rehearsal (:mod:`tests.rehearsal.emulator`) and the kit's stand-ins
in place of CUDA kernels. What it hides: streams and events run at once and in order, memory is never short, and a host
tensor handed to a kernel is not noticed.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import torch
from torch import library as operators
from torch.overrides import TorchFunctionMode

from tests.rehearsal import interpreter
from tests.rehearsal.emulator import Graph, captured_by

PROPERTIES = SimpleNamespace(
    # Of Ampere: what only later ones have (launches that overlap, tensor memory) the interpreter has not.
    name="faked device",
    major=8,
    minor=0,
    multi_processor_count=4,
    total_memory=8 << 30,
    L2_cache_size=1 << 20,
    is_integrated=False,
    warp_size=32,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    shared_memory_per_multiprocessor=233472,
    shared_memory_per_block_optin=232448,
)


class OnHost(TorchFunctionMode):
    """Every ``device=`` and ``.to()`` that names a CUDA device means the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: on_host(value) for name, value in (kwargs or {}).items() if name != "pin_memory"}
        return func(*[on_host(value) for value in args], **kwargs)


def on_host(value: Any) -> Any:
    """``value``, or the host's device if it names a CUDA device."""
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    return "cpu" if isinstance(value, str) and value.split(":")[0] == "cuda" else value


class Stream:
    """Runs at once what is put on it."""

    device, device_index = torch.device("cpu"), 0
    _handles = itertools.count()

    def __init__(self, *args: Any, **options: Any) -> None:
        # SGLang asks for streams until it gets one that it has not yet.
        self.cuda_stream = self.stream_id = next(self._handles)

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Event:
        event = event or Event()
        event.record()
        return event

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: Any) -> None: ...


class Event:
    """A point in host time."""

    cuda_event = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        self._at = 0.0

    def record(self, stream: Any = None) -> None:
        self._at = time.perf_counter()

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end._at - self._at)


class Chosen:
    """``with torch.cuda.device(index):`` there is only one."""

    def __init__(self, device: Any) -> None:
        self.idx = 0

    def __enter__(self) -> None: ...

    def __exit__(self, *error: Any) -> None: ...


def _answering(value: Any) -> Any:
    """A function of its own for each name: torch's compiler refuses one function under two."""
    return lambda *args, **options: value


_STREAM = Stream()
_STATS = [f"{kind}_bytes.all.{when}" for kind in ("reserved", "allocated") for when in ("current", "peak")]
_ANSWERS: dict[str, Any] = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "is_bf16_supported": lambda *args: True,
    "is_current_stream_capturing": lambda: Graph.capturing is not None,
    "CUDAGraph": Graph,
    "graph": captured_by,
    "graph_pool_handle": lambda: (0, 0),
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "get_device_name": lambda device=None: PROPERTIES.name,
    "get_device_properties": lambda device=None: PROPERTIES,
    "get_device_capability": lambda device=None: (PROPERTIES.major, PROPERTIES.minor),
    "mem_get_info": lambda device=None: (PROPERTIES.total_memory, PROPERTIES.total_memory),
    "current_stream": lambda device=None: _STREAM,
    "default_stream": lambda device=None: _STREAM,
    "stream": lambda stream: contextlib.nullcontext(),
    "StreamContext": lambda stream: contextlib.nullcontext(),
    "device": Chosen,
    "Stream": Stream,
    "Event": Event,
    "memory_stats": lambda device=None: dict.fromkeys(_STATS, 0),
    **{name: _answering(0) for name in ("memory_allocated", "memory_reserved", "max_memory_allocated")},
    **{name: _answering(None) for name in ("init", "synchronize", "empty_cache", "ipc_collect", "set_device")},
    **{name: _answering(None) for name in ("set_stream", "manual_seed", "manual_seed_all", "set_sync_debug_mode")},
    "reset_peak_memory_stats": lambda device=None: None,
}


def install() -> None:
    """Fake the device in this process, for every thread that starts from now on."""
    for name, answer in _ANSWERS.items():
        setattr(torch.cuda, name, answer)
    torch.version.cuda = torch.version.cuda or "13.0"
    # Kernels' launchers find the module of a tensor's device by its name.
    torch.get_device_module = lambda device=None: torch.cuda
    torch.cpu.device = Chosen
    torch.Tensor.is_cuda = property(lambda tensor: True)
    # What SGLang has copied to the host must be there; our operations choose their GPU's way.
    torch.Tensor.is_cpu = property(lambda tensor: not _asked_by_us())
    torch.Tensor.cuda = lambda tensor, *args, **options: tensor
    torch.Tensor.pin_memory = lambda tensor, *args: tensor
    torch.Tensor.record_stream = _answering(None)
    _operators_for_the_host()
    _groups_of_one_process()
    OnHost().__enter__()
    interpreter.install()
    run = threading.Thread.run

    def run_on_host(thread: threading.Thread) -> None:
        with OnHost():
            run(thread)

    threading.Thread.run = run_on_host  # type: ignore[method-assign]


def _asked_by_us() -> bool:
    return str(sys._getframe(2).f_globals.get("__name__")).startswith("sglang_dflash")


def _operators_for_the_host() -> None:
    """What is registered for CUDA tensors serves those that stand for them."""
    implement = operators.Library.impl

    def implement_on_host(library: Any, name: Any, function: Any, dispatch_key: str = "", **options: Any) -> Any:
        ours = library.ns == "sglang" and dispatch_key == "CUDA"
        return implement(library, name, function, "CPU" if ours else dispatch_key, **options)

    operators.Library.impl = implement_on_host  # type: ignore[method-assign]


def _groups_of_one_process() -> None:
    """NCCL needs a device; Gloo serves tensors in host memory."""
    start = torch.distributed.init_process_group

    def start_on_host(backend: str | None = None, *args: Any, **options: Any) -> None:
        start("gloo", *args, **{name: value for name, value in options.items() if name != "device_id"})

    torch.distributed.init_process_group = start_on_host
    new = torch.distributed.new_group

    def new_on_host(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **options: Any) -> Any:
        return new(ranks, timeout, "gloo", *args, **options)

    torch.distributed.new_group = new_on_host
