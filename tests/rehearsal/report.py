"""What a rehearsal met, counted in SGLang's scheduler and graph runners, and added to the scheduler's state."""

from __future__ import annotations

import collections
from typing import Any

from tests.rehearsal import launches
from tests.rehearsal.interpreter import COMPILED, LAUNCHES

# "replays: target 4" (role, batch size; "replays: prefill" of the target), "widths: target 8" (replays by width),
# "eager: target 4" and "eager widths: target 8" (forwards without a graph), "events: retracted".
MET: collections.Counter[str] = collections.Counter()
# Captured graphs: "target 4, width 8" to the nodes and to how many of them are kernel launches.
GRAPHS: dict[str, dict[str, int]] = {}
# Kernels that were compiled before the server took requests.
_AT_START: set[str] = set()


def add(result: Any, *_: Any) -> Any:
    """Hook after ``Scheduler.get_internal_state``, where ``Engine.get_server_info`` reads."""
    met = {**MET, **{f"launches: {kernel}": count for kernel, count in LAUNCHES.items()}}
    late = sorted(COMPILED - _AT_START)
    steps = [vars(step) for step in launches.STEPS]
    result.internal_state["rehearsal"] = {"met": met, "graphs": GRAPHS, "compiled late": late, "steps": steps}
    return result


def started() -> None:
    """Replacement of ``mark_serving_started``."""
    _AT_START.update(COMPILED)


def retracted(result: Any, *_: Any, **__: Any) -> None:
    """Hook after ``ScheduleBatch.retract_decode``."""
    MET["events: retracted"] += len(result[0])


def mixed(result: Any, *_: Any, **__: Any) -> None:
    """Hook after ``ScheduleBatch.mix_with_running``."""
    MET["events: mixed batches"] += 1


def prefilled(result: Any, batch: Any, *_: Any, **__: Any) -> None:
    """Hook after ``ScheduleBatch.prepare_for_extend``."""
    MET["events: cached tokens"] += sum(batch.prefix_lens)


def watch_runners() -> None:
    """Wrap the graph runners' back ends and the model runner's forward, in this process."""
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.model_executor.runner_backend.full_cuda_graph_backend import FullCudaGraphBackend
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import breakable_cuda_graph

    _watch_full(FullCudaGraphBackend)
    _watch_segments(breakable_cuda_graph.BreakableCUDAGraph)
    _watch_forwards(ModelRunner)


def _role(runner: Any) -> str:
    return "drafter" if runner.is_draft_worker else "target"


def _watch_full(backend: Any) -> None:
    capture, replay = backend.capture_one, backend.replay

    def capture_one(self: Any, shape_key: Any, forward: Any, *args: Any, **kwargs: Any) -> None:
        calls = iter((forward, lambda: None, forward))  # leave out one of two equal warm-ups: they take long here
        capture(self, shape_key, lambda: next(calls)(), *args, **kwargs)
        graph = self._graphs[shape_key]
        graph.poison()  # what a capture left in memory is no result
        runner = self._cuda_graph_runner
        name = f"{_role(runner.model_runner)} {shape_key.size}, width {runner.captured_req_width}"
        GRAPHS[name] = {"nodes": len(graph.nodes), "launches": graph.launches}

    def replay_one(self: Any, shape_key: Any, *args: Any, **kwargs: Any) -> Any:
        output = replay(self, shape_key, *args, **kwargs)
        role, width = _role(self._cuda_graph_runner.model_runner), self._cuda_graph_runner.captured_req_width
        MET.update((f"replays: {role} {shape_key.size}", f"widths: {role} {width}"))
        self._graphs[shape_key].poison(keep=output)
        return output

    backend.capture_one, backend.replay = capture_one, replay_one


def _watch_segments(graph: Any) -> None:
    replay = graph.replay

    def replay_segments(self: Any) -> None:
        MET["replays: prefill"] += 1
        replay(self)

    graph.replay = replay_segments


def _watch_forwards(runner: Any) -> None:
    forward = runner.forward

    def forward_and_count(self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, forward_batch, *args, **kwargs)
        if forward_batch.forward_mode.is_cuda_graph() and not output.can_run_graph:
            width = len(forward_batch.input_ids) // forward_batch.batch_size
            MET.update((f"eager: {_role(self)} {forward_batch.batch_size}", f"eager widths: {_role(self)} {width}"))
        return output

    runner.forward = forward_and_count
