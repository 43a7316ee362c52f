"""A debugging aid: warn of, or raise at, any call inside a step that makes the host wait for the device.

A first call may wait, for a compilation or an autotuner, so a server should warn and only a test raise.
"""

from __future__ import annotations

import functools
import os
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from sglang_dflash.errors import DFlashError

SWITCH = "SGLANG_DFLASH_FORBID_SYNC"

# SGLang's functions that wait inside a step; the guard is suspended inside them.
EXCUSED = (
    # A list as index is copied from pageable memory: a hybrid target, in the step after a request ended.
    "sglang.srt.speculative.spec_utils.set_mamba_track_indices_from_reqs",
    # A length on the device sizes a tensor: Triton attention, sliding layers, a batch without a CUDA graph.
    "sglang.srt.layers.attention.triton_backend.update_sliding_window_buffer",
    # FlashInfer's plan copies lengths to the host: a drafter with sliding layers at every step, all other models in a
    # batch without a CUDA graph.
    "sglang.srt.layers.attention.flashinfer_backend.FlashInferIndicesUpdaterPrefill.call_begin_forward",
    "sglang.srt.layers.attention.flashinfer_backend.FlashInferIndicesUpdaterDecode.call_begin_forward",
)


@contextmanager
def _cuda_debug_mode(mode: str) -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


# By device type: a context in which a wait warns ("warn"), raises ("error") or does neither ("default").
MODES: dict[str, Callable[[str], AbstractContextManager[None]]] = {"cuda": _cuda_debug_mode}


def sync_guard(device: torch.device | str) -> Callable[[], AbstractContextManager[None]]:
    """Return a context for the part of a step that must not wait: SGLANG_DFLASH_FORBID_SYNC=1 warns, 2 raises.

    Raises:
        DFlashError: the variable has another value, or waits cannot be seen on this kind of device.
    """
    value, kind = os.environ.get(SWITCH) or "0", torch.device(device).type
    if value == "0":
        return nullcontext
    if value not in ("1", "2") or kind not in MODES:
        raise DFlashError(
            f"{SWITCH}={value!r} on a device of type {kind}",
            expected=f"0, or 1 (warn) or 2 (raise) on a device of type {' or '.join(MODES)}",
            remedy=f"unset {SWITCH}",
        )
    for name in EXCUSED:
        _excuse(name, MODES[kind])
    return functools.partial(MODES[kind], "error" if value == "2" else "warn")


def _excuse(path: str, debug_mode: Callable[[str], AbstractContextManager[None]]) -> None:
    owner_path, _, attribute = path.rpartition(".")
    owner = pkgutil.resolve_name(owner_path)
    original = getattr(owner, attribute)

    @functools.wraps(original)
    def unguarded(*args: Any, **kwargs: Any) -> Any:
        with debug_mode("default"):
            return original(*args, **kwargs)

    setattr(owner, attribute, unguarded)
