"""Launches of a decode step: what the host hands to the device, outside of CUDA graphs and as graphs.

``python -m tests.rehearsal.launches [PART OF A NAME ...]`` prints a table; ``-v`` lists each launch of a step as well.

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
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from tabulate import tabulate
from torch.utils._python_dispatch import TorchDispatchMode

from tests.rehearsal import interpreter
from tests.rehearsal.emulator import Graph
from tests.rehearsal.interpreter import pause
from tests.rehearsal.streams import HOST, Calls, Watch, tensors_in

if TYPE_CHECKING:
    from tests.rehearsal.scenarios import Request, Scenario

VARIABLE = "REHEARSE_LAUNCHES"
CATCHES_UP = ", injects before it drafts"  # what the drafter's graph cannot: a wider block, plain tokens
HEADERS = ("engine", "step", "graph replays", "launches outside", "in forwards", "both")
WORKER = "sglang_dflash.worker.worker.DFlashWorker"
SGLANGS = "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2"  # the kit's other arm


POOL = "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool"
RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_NO_CALLERS = ("/torch/", "/triton/", "/tests/rehearsal/", "/contextlib.py", "/plugins/hook_registry.py")


@dataclass
class Counted:
    """One decode step: kind, graph replays, and launches outside of graphs, each with its place; those inside
    of ``ModelRunner.forward`` are apart."""

    kind: str
    replays: int = 0
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
    step, watch = Counted(_kind(batch)), Watch()
    for owner in (batch, batch.spec_info, getattr(worker, "_rings", None)):
        for name, value in vars(owner).items() if owner is not None else ():
            if name.endswith("_cpu") and isinstance(value, torch.Tensor):
                watch.of(value, HOST)
    _running.append(step)
    with _Operators(watch), Calls(watch):
        result = original(worker, batch, *args, **kwargs)
    _running.pop()
    step.kind += f", width {result.speculative_num_draft_tokens}"
    step.launches = [launch for launch in step.launches if not launch.endswith(" constant")]  # made once
    if any(launch.endswith(" write_context") for launch in step.launches):
        step.kind += CATCHES_UP
    STEPS.append(step)
    return result


def _in_forward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not _running:
        return original(*args, **kwargs)
    step = _running[-1]
    before = len(step.launches)
    result = original(*args, **kwargs)
    step.in_forwards += step.launches[before:]
    del step.launches[before:]
    return result


def _kind(batch: Any) -> str:
    return "greedy" if batch.sampling_info.is_all_greedy else "sampled"


def _note(name: str) -> None:
    if _running:
        _running[-1].launches.append(f"{name} < {_caller()}")


def _caller() -> str:
    """File, line and function of the innermost frame outside of PyTorch, Triton and the rehearsal."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and any(part in frame.f_code.co_filename for part in _NO_CALLERS):
        frame = frame.f_back
    assert frame is not None
    path = "/".join(frame.f_code.co_filename.rsplit("/", 3)[1:])
    return f"{path}:{frame.f_lineno} {frame.f_code.co_name}"


@contextmanager
def _aside() -> Iterator[None]:
    """Nothing in here is counted."""
    running = _running[:]
    _running.clear()
    try:
        yield
    finally:
        _running[:] = running


class _Operators(TorchDispatchMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _running:
            return func(*args, **kwargs)
        with self:  # in inference mode composite operators arrive whole
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        before = len(_running[-1].launches)
        result = func(*args, **kwargs)
        name, inner = func._schema.name, len(_running[-1].launches) > before  # kernels of an operator of SGLang
        given = list(tensors_in((args, kwargs)))
        known = {tensor.untyped_storage()._cdata for tensor in given}
        fresh = [tensor for tensor in tensors_in(result) if tensor.untyped_storage()._cdata not in known]
        writes = any(each.alias_info is not None and each.alias_info.is_write for each in func._schema.arguments)
        if name == "aten::lift_fresh" and given[0].dim():  # ``torch.tensor``, which makes it unseen
            fresh = given
        for tensor in fresh:
            self._watch.of(tensor, HOST if self._watch.born_on_host else None)
        allocates = "empty" in name
        on_host = all(map(self._watch.on_host, (*given, *fresh)))
        if (fresh or writes) and not (allocates or on_host or inner):
            _note(name)
        return result


# --- the engines


def engines() -> dict[str, Scenario]:
    """Return the engines whose steps are counted, by name; in bfloat16, as on a GPU."""
    from tests.rehearsal.scenarios import COPIES, DENSE, HYBRID, RANDOM_WIDTHS, REPLAY, Scenario, ask

    counted, filters = {VARIABLE: "1"}, {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "min_p": 0.02}
    snapshots = {"mamba_radix_cache_strategy": "extra_buffer"}

    def greedy(pair: str, tokens: int = 16) -> Request:
        return ask(pair, 2, tokens, growth=0, cut=50)

    def short(pair: str, **sampling: Any) -> Request:
        return ask(pair, 2, 4, growth=0, cut=10, **sampling)

    def scenario(pair: str, *requests: Request, options: Mapping[str, Any] = {}, **environment: str) -> Scenario:
        options = {"max_running_requests": 2, "dtype": "bfloat16", **(snapshots if pair == HYBRID else {}), **options}
        return Scenario("", pair, requests, (), graphs=(2,), options=options, environment=counted | environment)

    sampled = short(HYBRID, **filters)
    return {
        "hybrid, replayed": scenario(HYBRID, greedy(HYBRID), sampled, **REPLAY),
        "hybrid, kept": scenario(HYBRID, greedy(HYBRID)),
        "hybrid, adaptive": scenario(HYBRID, greedy(HYBRID, 40), options=RANDOM_WIDTHS, **REPLAY),
        "dense": scenario(DENSE, greedy(DENSE)),
        "dense, copies": scenario(DENSE, greedy(DENSE), **{COPIES: "1"}),
        "dense, draft window": scenario(DENSE, greedy(DENSE), options={"speculative_draft_window_size": 32}),
    }


def most(steps: Sequence[Mapping[str, Any]]) -> dict[str, tuple[int, int, int]]:
    """Return the most graph replays, launches outside of graphs and launches in forwards of each kind of step."""
    found: dict[str, tuple[int, int, int]] = {}
    for step in steps:
        counts = step["replays"], len(step["launches"]), len(step["in_forwards"])
        found[step["kind"]] = tuple(map(max, counts, found.get(step["kind"], counts)))  # type: ignore[assignment]
    return dict(sorted(found.items()))


def main() -> None:
    from tests.rehearsal.run import run

    parser = ArgumentParser(prog="python -m tests.rehearsal.launches", description="Count the launches of a step.")
    parser.add_argument("names", nargs="*", default=[""], metavar="PART OF AN ENGINE'S NAME")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="list the launches of the longest step of each kind"
    )
    asked = parser.parse_args()
    rows: list[tuple[object, ...]] = []
    for engine, scenario in engines().items():
        if any(name in engine for name in asked.names):
            found = run(scenario, rehearse=True)
            steps = found.report.get("steps", [])
            kinds = most(steps).items()
            rows += [(engine, kind, *counts, sum(counts[1:])) for kind, counts in kinds] or [
                (engine, found.error[-300:])
            ]
            for kind in most(steps) if asked.verbose else ():
                longest = max((step for step in steps if step["kind"] == kind), key=lambda step: len(step["launches"]))
                print(
                    engine, kind, *longest["launches"], "in forwards:", *longest["in_forwards"], sep="\n  ", flush=True
                )
    print(tabulate(rows, headers=HEADERS, tablefmt="github"))


if __name__ == "__main__":
    main()
