"""A debugging aid: warn of, or raise at, any call that makes the host wait for the device inside a step.

A wait ends the head start of the overlap scheduler. PyTorch's sync debug mode finds waits on CUDA; other devices need
a watcher in :data:`WATCHERS`. The guard is suspended inside SGLang's own functions that may wait, :data:`EXCUSED`. A
first call may wait once more, for a compilation or an autotuner, so a server should warn and only a test raise.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import torch

from sglang_dflash.errors import DFlashError
from sglang_dflash.upstream import SYMBOLS

SWITCH = "SGLANG_DFLASH_FORBID_SYNC"

# SGLang's functions that wait inside a step, by name in ``upstream``: the line that waits, and when it runs.
# ``tests/worker/test_no_sync_excused.py`` fails when SGLang removes a line.
EXCUSED = {
    "set_mamba_track_indices_from_reqs": (
        "batch.mamba_track_indices[freed_rows] = -1",
        "a list as index is copied from pageable memory: a hybrid target, in the step after a request ended",
    ),
    "update_sliding_window_buffer": (
        "window_kv_indptr[-1], dtype=torch.int64, device=device",
        "a length on the device sizes a tensor: Triton attention, sliding layers, a batch without a CUDA graph",
    ),
    "FlashInferIndicesUpdaterPrefill.call_begin_forward": (
        "wrapper_paged.begin_forward(",
        "FlashInfer's plan copies lengths to the host, three times: a drafter with sliding layers at every step, all "
        "other models in a batch without a CUDA graph",
    ),
    "FlashInferIndicesUpdaterDecode.call_begin_forward": (
        "wrapper.begin_forward(",
        "the same in a step of the anchor alone, in a batch without a CUDA graph",
    ),
}


@contextlib.contextmanager
def _watch_cuda(mode: str) -> Iterator[None]:
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


WATCHERS: dict[str, Callable[[str], contextlib.AbstractContextManager[None]]] = {"cuda": _watch_cuda}
"""By device type: a context that warns ("warn") or raises ("error") at a wait, unless :data:`suspended`."""

suspended = False
"""Whether an excused function is running."""


@contextlib.contextmanager
def _suspend() -> Iterator[None]:
    global suspended
    suspended, before = True, suspended
    mode = torch.cuda.get_sync_debug_mode() if torch.cuda.is_initialized() else None
    if mode is not None:
        torch.cuda.set_sync_debug_mode("default")
    try:
        yield
    finally:
        suspended = before
        if mode is not None:
            torch.cuda.set_sync_debug_mode(mode)


def _excuse(name: str) -> None:
    owner_path, _, attribute = SYMBOLS[name].path.rpartition(".")
    owner = pkgutil.resolve_name(owner_path)
    original = getattr(owner, attribute)
    if getattr(original, "excused", False):
        return

    @functools.wraps(original)
    def unguarded(*args: Any, **kwargs: Any) -> Any:
        with _suspend():
            return original(*args, **kwargs)

    unguarded.excused = True  # type: ignore[attr-defined]
    setattr(owner, attribute, unguarded)


def sync_guard(device: torch.device | str) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return a context for the part of a step that must not wait: SGLANG_DFLASH_FORBID_SYNC=1 warns, 2 raises.

    Raises:
        DFlashError: the variable has another value, or nothing watches this kind of device.
    """
    value = os.environ.get(SWITCH, "")
    if value not in ("", "0", "1", "2"):
        raise DFlashError(f"{SWITCH}={value!r}", expected="0, 1, 2, or unset", remedy=f"unset {SWITCH}")
    if value in ("", "0"):
        return contextlib.nullcontext
    kind = torch.device(device).type
    if kind not in WATCHERS:
        raise DFlashError(
            f"{SWITCH}={value} cannot watch a device of type {kind}",
            expected=f"a device of type {' or '.join(WATCHERS)}",
            remedy=f"unset {SWITCH}",
        )
    for name in EXCUSED:
        _excuse(name)
    return functools.partial(WATCHERS[kind], "error" if value == "2" else "warn")
