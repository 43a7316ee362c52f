"""Launches of a decode step: what the host hands to the device, outside of CUDA graphs and as graphs.

A launch is an operator of PyTorch that touches the device, but for views and allocations, a copy between host and
device, or a kernel of Triton. A layer's K/V store is one, and so is a stand-in of the CPU platform or of the rehearsal.
Counted is the worker's ``forward_batch_generation``; apart, what ``ModelRunner.forward`` launches around a graph, whose
buffers and the attention backend's SGLang fills (its own worker fills the target's outside). The scheduler's launches
around a step are not counted.

It hides functions of SGLang that choose another kernel on a GPU (a graph's buffers are filled one by one here and
together there, samples are drawn by torch here and by FlashInfer there), and operators that are several kernels.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.rehearsal import interpreter
from tests.rehearsal.emulator import Graph
from tests.rehearsal.interpreter import pause
from tests.rehearsal.streams import HOST, Calls, Operators, Watch, place_of_caller

VARIABLE = "REHEARSE_LAUNCHES"
CATCHES_UP = ", injects before it drafts"  # what the drafter's graph cannot: a wider block, plain tokens
WORKER = "sglang_dflash.worker.worker.DFlashWorker"
SGLANGS = "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2"  # the kit's other arm
POOL = "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool"
RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
GRAPHS = "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"


@dataclass
class Counted:
    """One decode step: kind, graph replays, SGLang's forwards, and launches outside of graphs, each with its place;
    those inside of ``ModelRunner.forward``, or of a verify that is planned before the draft, are apart."""

    kind: str
    replays: int = 0
    forwards: int = 0
    launches: list[str] = field(default_factory=list)
    in_forwards: list[str] = field(default_factory=list)


STEPS: list[Counted] = []
_running: list[Counted] = []


def one_launch(function: Callable[..., Any]) -> Callable[..., Any]:
    """Count a call of a stand-in as one launch; the operators in it are not counted."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _running:
            return function(*args, **kwargs)
        _note(function.__name__)
        with _aside(), pause():
            return function(*args, **kwargs)

    return call


def install() -> None:
    """Count the worker's steps in this process, if the environment asks for it."""
    if not os.environ.get(VARIABLE):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{WORKER}.forward_batch_generation", _count, HookType.AROUND)
    HookRegistry.register(f"{SGLANGS}.__init__", _on_cuda, HookType.BEFORE)
    HookRegistry.register(f"{RUNNER}.forward", _in_forward, HookType.AROUND)
    HookRegistry.register(f"{GRAPHS}.load_batch", _in_plan, HookType.AROUND)
    for store in ("set_kv_buffer", "set_kv_buffer_prefix_valid"):  # on a GPU one kernel
        HookRegistry.register(f"{POOL}.{store}", _one_store, HookType.AROUND)
    interpreter.watchers.append(_note)
    replay, poison = Graph.replay, Graph.poison

    def replay_and_count(self: Graph) -> None:
        if _running:
            _running[-1].replays += 1
        with _aside():
            replay(self)

    def poison_aside(self: Graph, keep: Any = ()) -> None:
        with _aside():
            poison(self, keep)

    Graph.replay, Graph.poison = replay_and_count, poison_aside  # type: ignore[method-assign]


def _one_store(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return one_launch(original)(*args, **kwargs)


def _on_cuda(*args: Any, **kwargs: Any) -> Any:
    """Hook before the constructor of SGLang's worker: it chooses its kernels as on a GPU."""
    sys.modules[SGLANGS.rpartition(".")[0]].is_cuda = lambda: True  # type: ignore[attr-defined]
    return args, kwargs


def _count(original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    if batch.forward_mode.is_extend() or batch.is_extend_in_batch or batch.forward_mode.is_idle():
        return original(worker, batch, *args, **kwargs)
    step, watch = Counted("greedy" if batch.sampling_info.is_all_greedy else "sampled"), _Launches()
    for owner in (batch, batch.spec_info, worker.rings):
        for name, value in vars(owner).items() if owner is not None else ():
            if name.endswith("_cpu") and isinstance(value, torch.Tensor):
                watch.of(value, HOST)
    _running.append(step)
    with Operators(watch), Calls(watch):
        result = original(worker, batch, *args, **kwargs)
    _running.pop()
    step.kind += f", width {result.speculative_num_draft_tokens}"
    step.launches = [launch for launch in step.launches if not launch.endswith(" constant")]  # made once
    if any(launch.endswith(" write_context") for launch in step.launches):
        step.kind += CATCHES_UP
    STEPS.append(step)
    return result


def _in_forward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if _running:
        _running[-1].forwards += 1
    return _in_plan(original, *args, **kwargs)


def _in_plan(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not _running:
        return original(*args, **kwargs)
    step = _running[-1]
    before = len(step.launches)
    result = original(*args, **kwargs)
    step.in_forwards += step.launches[before:]
    del step.launches[before:]
    return result


def _note(name: str) -> None:
    if _running:
        _running[-1].launches.append(f"{name} < {place_of_caller()}")


@contextmanager
def _aside() -> Iterator[None]:
    """Nothing in here is counted."""
    running = _running[:]
    _running.clear()
    try:
        yield
    finally:
        _running[:] = running


class _Launches(Watch):
    """Counts the operators of the running step that touch the device."""

    def operator(
        self, name: str, reads: list[Tensor], writes: list[Tensor], fresh: list[Tensor], *, waits: bool
    ) -> None:
        for tensor in fresh:
            self.of(tensor, HOST if self.born_on_host else None)
        on_host = all(map(self.on_host, (*reads, *writes, *fresh)))
        number = name == "aten::lift_fresh" and not fresh[0].dim()  # an argument of the kernel that takes it
        if (fresh or writes) and not (on_host or number or "empty" in name):
            _note(name)
