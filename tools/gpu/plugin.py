"""SGLang plugin of the kit, in every server: a slice of the memory, packed modules, host times.

Variables: ``GPU_KIT_GIB`` (the slice), ``GPU_KIT_MODULES``, ``GPU_KIT_HOST``. It replaces no function of this package:
a worker that the kit changes is not the one that users get.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from tools.gpu import modules

HOST = "GPU_KIT_HOST "  # begins a line of the log
WINDOW = 40  # decode loops per line
REPLACED: dict[str, Callable[..., Any]] = {
    # Needs NVIDIA's CuTe DSL; without a mode the gate and up projections run separately.
    "srt.layers.dual_gemm.DualGemm._select_mode": lambda self, gate_up_proj, hidden_size: None,
    # SGLang's worker rehearses sampling with FlashInfer's kernels at start, unless they are unavailable.
    "srt.speculative.dflash_utils.is_dflash_sampling_verify_available": lambda: False,
}
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_RUNNERS = "sglang.srt.model_executor"
# What the host runs in a step, of our worker and of SGLang's; a forward is part of a draft or a verify, loads and
# replays are parts of forwards.
STAGES = {
    "reserve": "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_decode",
    "layout": "sglang_dflash.worker.layout.Layout.lay_out",
    "plan": "sglang_dflash.worker.forwards.Verify.plan",
    "draft": "sglang_dflash.worker.forwards.Draft.draft",
    "verify": "sglang_dflash.worker.forwards.Verify.verify",
    "accept": "sglang_dflash.worker.accept.Accept.accept",
    "commit": "sglang_dflash.states.commit.RecurrentCommit.advance",
    "publish": "sglang.srt.managers.overlap_utils.FutureMap.publish",
    "inject": "sglang_dflash.worker.forwards.Inject.inject",
    "forward": f"{_RUNNERS}.model_runner.ModelRunner.forward",
    "load": f"{_RUNNERS}.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.load_batch",
    "replay": f"{_RUNNERS}.runner_backend.full_cuda_graph_backend.FullCudaGraphBackend.replay",
}


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if gib := float(os.environ.get("GPU_KIT_GIB") or 0):
        torch.cuda.mem_get_info = torch.cuda.memory.mem_get_info = sliced(int(gib * 2**30))
    if os.environ.get("GPU_KIT_MODULES") and torch.cuda.is_available():
        HookRegistry.register("sglang.kernels.jit.utils.compile.loader.load_jit", modules.load_jit, HookType.AROUND)
        for target, replacement in REPLACED.items():
            HookRegistry.register(f"sglang.{target}", replacement, HookType.REPLACE)
    if os.environ.get("GPU_KIT_HOST"):
        times = HostTimes()
        HookRegistry.register(f"{SCHEDULER}.run_batch", times.run_batch, HookType.AROUND)
        HookRegistry.register(f"{SCHEDULER}.process_batch_result", times.around("process_ms"), HookType.AROUND)
        for stage, function in STAGES.items():
            HookRegistry.register(function, times.around(f"{stage}_ms"), HookType.AROUND)
        waiting, wait = torch.cuda.Event.synchronize, times.around("wait_ms")
        torch.cuda.Event.synchronize = lambda event: wait(waiting, event)


def sliced(total: int) -> Callable[..., tuple[int, int]]:
    """Return ``torch.cuda.mem_get_info`` of a device of ``total`` bytes that this process has alone."""
    return lambda device=None: (max(0, total - torch.cuda.memory_reserved(device)), total)


class HostTimes:
    """Prints milliseconds of the host per loop, for every :data:`WINDOW` decode loops in a row of one batch size."""

    def __init__(self) -> None:
        self._spent, self._batch, self._loops, self._since = Counter[str](), 0, 0, 0.0

    def around(self, name: str) -> Callable[..., Any]:
        def hook(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return original(*args, **options)
            finally:
                self._spent[name] += time.perf_counter() - start

        return hook

    def run_batch(self, original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **options: Any) -> Any:
        size = batch.batch_size() if batch.forward_mode.is_decode() else 0
        if size != self._batch or self._loops == WINDOW:
            if size == self._batch > 0:
                milliseconds = {"loop_ms": time.perf_counter() - self._since, **self._spent}
                each = {name: round(1000 * seconds / WINDOW, 3) for name, seconds in milliseconds.items()}
                print(HOST + json.dumps({"batch": size, **each}), flush=True)
            self._spent.clear()
            self._batch, self._loops, self._since = size, 0, time.perf_counter()
        self._loops += 1
        return self.around("run_batch_ms")(original, scheduler, batch, *args, **options)
