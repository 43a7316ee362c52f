"""What a rehearsal met, counted in SGLang's scheduler and graph runners, and added to the scheduler's state."""

from __future__ import annotations

import collections
from typing import Any

from tests.rehearsal import backends
from tests.rehearsal.interpreter import COMPILED, LAUNCHES

# "replays: target 4" (role, batch size; "replays: prefill" of the target), "widths: target 8" (replays by width),
# "replayed by: DraftGraphs" (a class), "eager: target 4" and "eager widths: target 8" (forwards without a graph),
# "events: retracted", "events: track boundaries" (crossed by requests).
MET: collections.Counter[str] = collections.Counter()
# Kernels that were compiled before the server took requests.
_AT_START: set[str] = set()
# Requests that crossed a track boundary, by step. A step that read them would wait.
_TRACKED: list[Any] = []


def add(result: Any, *_: Any) -> Any:
    """Hook after ``Scheduler.get_internal_state``, where ``Engine.get_server_info`` reads."""
    MET["events: track boundaries"] = sum(map(int, _TRACKED))
    met = {**MET, **{f"launches: {kernel}": count for kernel, count in LAUNCHES.items()}}
    result.internal_state["rehearsal"] = {"met": met, "compiled late": sorted(COMPILED - _AT_START)}
    return result


def started() -> None:
    """Replacement of ``mark_serving_started``."""
    _AT_START.update(COMPILED)
    _TRACKED.clear()
    backends.started()


def retracted(result: Any, *_: Any, **__: Any) -> None:
    """Hook after ``ScheduleBatch.retract_decode``."""
    MET["events: retracted"] += len(result[0])


def mixed(result: Any, *_: Any, **__: Any) -> None:
    """Hook after ``ScheduleBatch.mix_with_running``."""
    MET["events: mixed batches"] += 1


def prefilled(result: Any, batch: Any, *_: Any, **__: Any) -> None:
    """Hook after ``ScheduleBatch.prepare_for_extend``."""
    MET["events: cached tokens"] += sum(batch.prefix_lens)


def advanced(_: None, __: Any, step: Any) -> None:
    """Hook after ``RecurrentCommit.advance``."""
    _TRACKED.append((step.accepted.counts[1:] > 0).sum())


def _role(runner: Any) -> str:
    return "drafter" if runner.is_draft_worker else "target"


def capture(original: Any, backend: Any, shape_key: Any, forward: Any, *args: Any, **kwargs: Any) -> None:
    """Hook around ``FullCudaGraphBackend.capture_one``."""
    # leave out one of two equal warm-ups: they take long here
    calls = iter((forward, lambda: None, forward))
    original(backend, shape_key, lambda: next(calls)(), *args, **kwargs)
    backend._graphs[shape_key].poison()  # what a capture left in memory is no result


def replayed(output: Any, backend: Any, shape_key: Any, *_: Any, **__: Any) -> None:
    """Hook after ``FullCudaGraphBackend.replay``."""
    runner = backend._cuda_graph_runner
    role, width, by = _role(runner.model_runner), runner.captured_req_width, type(runner).__name__
    MET.update((f"replays: {role} {shape_key.size}", f"widths: {role} {width}", f"replayed by: {by}"))
    backend._graphs[shape_key].poison(keep=output)


def replayed_prefill(*_: Any) -> None:
    """Hook after ``BreakableCUDAGraph.replay``."""
    MET["replays: prefill"] += 1


def forwarded(output: Any, runner: Any, forward_batch: Any, *_: Any, **__: Any) -> None:
    """Hook after ``ModelRunner.forward``."""
    if forward_batch.forward_mode.is_cuda_graph() and not output.can_run_graph:
        width = len(forward_batch.input_ids) // forward_batch.batch_size
        MET.update((f"eager: {_role(runner)} {forward_batch.batch_size}", f"eager widths: {_role(runner)} {width}"))
