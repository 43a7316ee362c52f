"""Debugging aids of a step: profiler ranges, and a guard against calls that synchronise with the device.

A first call may wait for a compilation, so a server should only warn. SGLang functions that synchronise:
``set_mamba_track_indices_from_reqs`` (hybrid targets, one step after a request ends), and with FlashInfer
``call_begin_forward`` (no CUDA graph, or a drafter with sliding layers for which it was requested).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.profiler import record_function

from sglang_dflash.errors import DFlashError

SWITCH = "SGLANG_DFLASH_FORBID_SYNC"
_NO_RANGE: AbstractContextManager[None] = nullcontext()


def stage(name: str) -> AbstractContextManager[Any]:
    """Return a stage's profiler range; without a profiler it would cost several small operators."""
    return record_function(f"dflash.{name}") if torch.autograd._profiler_enabled() else _NO_RANGE


@contextmanager
def _cuda_debug_mode(mode: str) -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


# by device type: a context in which a sync warns, raises or does neither
MODES: dict[str, Callable[[str], AbstractContextManager[None]]] = {"cuda": _cuda_debug_mode}


def sync_guard(device: torch.device | str) -> Callable[[], AbstractContextManager[None]]:
    """Return a context for code that must not synchronise: SGLANG_DFLASH_FORBID_SYNC=1 warns, 2 raises.

    Raises:
        DFlashError: the variable has another value, or syncs cannot be detected on this device.
    """
    value, kind = os.environ.get(SWITCH) or "0", torch.device(device).type
    if value == "0":
        return nullcontext
    if value not in ("1", "2") or kind not in MODES:
        raise DFlashError(f"{SWITCH}={value!r} on a device of type {kind} is not available", remedy=f"unset {SWITCH}")
    return partial(MODES[kind], "error" if value == "2" else "warn")
