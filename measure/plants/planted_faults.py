"""Faults planted in our worker on purpose, to see that a benchmark shows them. Never part of the package.

``PLANT=sleep:SECONDS`` makes every decode step that much slower; ``PLANT=token:N`` reports a wrong token in every N-th
decode step. Enabled for one arm of a comparison:

    sglang-dflash bench --modes ar,dflash:16,dflash:16+PYTHONPATH=measure/plants+PLANT=sleep:0.01 …
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from typing import Any

_STEP = "sglang_dflash.worker.worker.DFlashWorker.forward_batch_generation"


def register() -> None:
    """Entry point of group ``sglang.srt.plugins``."""
    kind, _, size = os.environ.get("PLANT", "").partition(":")
    if not kind:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    plant = {"sleep": lambda: slow_steps(float(size)), "token": lambda: wrong_tokens(int(size))}[kind]()
    HookRegistry.register(_STEP, plant, HookType.AROUND)


def slow_steps(seconds: float) -> Callable[..., Any]:
    def step(original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if batch.forward_mode.is_decode():
            time.sleep(seconds)
        return original(worker, batch, *args, **kwargs)

    return step


def wrong_tokens(every: int) -> Callable[..., Any]:
    """The step itself goes on with the right token, so one wrong token stays one wrong token."""
    steps = itertools.count(1)

    def step(original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        decode = batch.forward_mode.is_decode()
        result = original(worker, batch, *args, **kwargs)
        if decode and next(steps) % every == 0:
            tokens = result.next_token_ids.clone()
            tokens.view(-1)[0] += 1
            result.next_token_ids = tokens
        return result

    return step
