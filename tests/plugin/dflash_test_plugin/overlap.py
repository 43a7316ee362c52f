"""The scheduler's event loop on emulated streams: mode ``refusals`` ends the server where CUDA refuses a call, or where
the host reads a copy before its event; mode ``streams`` records that and every race.

The loop runs as on CUDA, with SGLang's write-after-read barrier, and finer than the CPU platform alone would have it:
what the scheduler waits for before it writes shared tables is the end of the target's forward, as with a CUDA graph,
not the end of the step. ``streams.json`` in the probe's folder holds what is found.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from torch import Tensor

from dflash_test_plugin.probe import FOLDER, _hook
from tests.rehearsal.streams import HOST, Event, Watch, current_stream, install, synchronize, watching

RECORDS = "SGLANG_DFLASH_TEST_REFUSALS_RECORDED"  # any value: log them, and go on
WATCH = Watch()
_active = False
_found: dict[str, Any] = {"races": [], "refused": [], "operators": 0, "steps": 0}


def refusals() -> None:
    """Run the scheduler on ``torch.cpu`` with emulated streams; what CUDA refuses ends the server."""
    WATCH.each_operator, WATCH.raises = False, os.environ.get(RECORDS) is None
    if os.environ.get("TRITON_INTERPRET"):  # a rehearsal
        import_module("tests.rehearsal.interpreter").argument_checks.append(WATCH.launch)
        stubs = import_module("tests.rehearsal.stubs")
        stubs.ON_THE_GPU |= stubs.ON_THE_GPU_WITH_THE_WATCH
    _watch()


def streams() -> None:
    """Record races and refusals instead, of every operator."""
    os.environ["SGLANG_ENABLE_WAR_BARRIER"] = "1"
    _watch()
    _hook("AFTER", "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation", end_shared_reads)
    _hook("AFTER", "sglang_dflash.worker.worker.DFlashWorker._decode", note)


def _watch() -> None:
    install()
    _hook("AROUND", "sglang.srt.managers.scheduler.Scheduler.run_event_loop", watch_scheduler)
    worker = "sglang_dflash.worker."
    for start in (
        "worker.DFlashWorker._build_stages",
        "worker.DFlashWorker._build_features",
        "start.prewarm.FirstCalls.run",
    ):
        _hook("AROUND", worker + start, watch_start)
    _hook("REPLACE", "sglang.srt.utils.common.async_d2h", async_d2h)
    _hook("REPLACE", "sglang.srt.speculative.spec_utils.record_stream_each", record_stream_each)
    _hook("REPLACE", "sglang_dflash_cpu.platform.DFlashCpuPlatform.is_pin_memory_available", lambda *_: _active)
    _hook("AROUND", worker + "accept.Accept.prepare", after_draft)


def watch_scheduler(original: Callable[..., Any], scheduler: Any) -> None:
    """Around ``Scheduler.run_event_loop``."""
    for name in ("schedule", "forward", "copy"):
        getattr(scheduler, f"{name}_stream").name = name
    WATCH.of(scheduler.req_to_token_pool.req_generation, HOST)
    synchronize()  # as ``FirstCalls``, which does nothing where no kernel runs
    watch_start(original, scheduler)


def watch_start(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Around what starts the worker, too."""
    global _active
    if _active:
        return original(*args, **options)
    for tensor in made_on_host():
        WATCH.of(tensor, HOST)
    _active = True
    with watching(WATCH):
        result = original(*args, **options)
    _active = False
    return result


def made_on_host() -> Iterator[Tensor]:
    """The host's tensors that were made while nothing was watched."""
    for owner in gc.get_objects():
        if type(owner).__name__ == "CudaGraphBufferRegistry":  # it serves eager forwards too
            yield from (
                slot.buffer for name, slot in owner._slots.items() if "_cpu" in name and slot.buffer is not None
            )
        elif type(owner).__name__ == "DraftRings":
            yield owner._oldest_cpu


def note(*_: Any) -> None:
    """After each decode step."""
    for name in ("races", "refused", "operators"):
        _found[name] += getattr(WATCH, name)
    _found["steps"] += 1
    WATCH.races, WATCH.refused, WATCH.operators = set(), set(), 0
    partial = FOLDER / "streams.json.part"
    partial.write_text(json.dumps(_found))
    partial.rename(FOLDER / "streams.json")


def async_d2h(tensor: Tensor) -> Tensor:
    """In place of SGLang's, which copies nothing on a CPU: a copy that the current stream makes."""
    if WATCH.on_host(tensor):
        return tensor
    host = WATCH.copy_to_host(tensor)
    tensor.record_stream(current_stream())
    return host


def record_stream_each(tensors: Any, stream: Any) -> None:
    """In place of SGLang's, which skips what is not on CUDA."""
    for tensor in tensors:
        tensor.record_stream(stream)


def after_draft(original: Callable[..., Any], stage: Any, step: Any) -> None:
    """SGLang's copy of a block for its grammars has no event where the device is a CPU: record one, as on CUDA."""
    original(stage, step)
    if step.grammar_tree is not None:
        step.grammar_tree._done = current_stream().record_event()


def end_shared_reads(result: Any, worker: Any, *args: Any, **kwargs: Any) -> Any:
    """After a forward of the target: what SGLang's graph runners do for the barrier."""
    event = Event()
    event.record()
    worker.model_runner.shared_read_done_event = event
    return result
