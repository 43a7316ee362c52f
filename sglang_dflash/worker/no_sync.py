"""A debugging aid: warn of, or raise at, anything that would make the host wait for the device inside a step.

Reading a value back (``.item()``, ``.tolist()``, ``if tensor:``, ``torch.equal``) or asking for a shape that depends on
values (``nonzero``, ``unique``, a boolean mask as an index) stops the host until the device has caught up, and the
overlap scheduler loses its head start. On a CPU such a call costs nothing, so only this guard shows it there.

It cannot see ``.cpu()``, a no-op there; ``.numpy()``, with which the CPU platform's attention reads lengths;
``x[mask] = value`` with a one-element value that a device would hold; and copies from pageable host memory, which wait
on CUDA: ``tests/serving/test_host_copies.py`` lists those.

SGLang's own functions that may wait inside a step are named in :data:`EXCUSED`. The guard is suspended for these calls;
otherwise it would fail on CUDA. A first call may wait once more, for a compilation or an autotuner: a server warns, and
only a test raises.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pkgutil
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_dflash.errors import DFlashError
from sglang_dflash.upstream import SYMBOLS

SWITCH = "SGLANG_DFLASH_FORBID_SYNC"

# SGLang's functions that wait inside a step, by name in ``upstream``: the line that waits, and when it runs.
# ``tests/worker/test_no_sync_excused.py`` fails once a line is gone.
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

# PyTorch's own classification of operators: these hand the host a value, or a shape that depends on values.
_WAITING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
_MASKS = (torch.bool, torch.uint8)


class HostSync(RuntimeError):
    """A step would have waited for the device."""


class HostSyncWarning(RuntimeWarning):
    """A step waited for the device."""


_lifted = False


def _raise(text: str) -> None:
    raise HostSync(text)


def _warn(text: str) -> None:
    warnings.warn(text, HostSyncWarning, stacklevel=1)  # one per text: the line of the step is not known here


class _WatchMethods(TorchFunctionMode):
    def __init__(self, report: Callable[[str], None]) -> None:
        super().__init__()
        self._report = report

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.tolist and not _lifted:  # on a CPU it needs no operator that could be seen
            self._report("tolist reads a tensor back to the host inside a step")
        return func(*args, **(kwargs or {}))


class _WatchOps(TorchDispatchMode):
    def __init__(self, report: Callable[[str], None]) -> None:
        super().__init__()
        self._report = report

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:  # in inference mode composite operators arrive whole: see what they are made of
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        if not _lifted and waits(func, args, kwargs):
            self._report(f"{func._schema.name} makes the host wait inside a step")
        return func(*args, **kwargs)


def waits(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operator, as a dispatch mode sees it, hands the host a value or a shape that depends on values."""
    name = func._schema.name
    if name in _INDEXING:
        masked = any(index is not None and index.dtype in _MASKS for index in args[1])
        return masked and not _fills(args)
    if name == "aten::repeat_interleave":
        return func._overloadname != "self_int" and kwargs.get("output_size") is None
    return not _WAITING.isdisjoint(func.tags)


def _fills(args: Any) -> bool:
    """``x[mask] = 0.0``: one mask and a single host value are a ``masked_fill_`` to PyTorch, on CUDA too."""
    indices = [index for index in args[1] if index is not None]
    return len(args) > 2 and len(indices) == 1 and args[2].numel() == 1 and args[2].device.type == "cpu"


@contextlib.contextmanager
def _watch_host(report: Callable[[str], None]) -> Iterator[None]:
    with _WatchMethods(report), _WatchOps(report):
        yield


@contextlib.contextmanager
def _watch_cuda(mode: str) -> Iterator[None]:
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextlib.contextmanager
def _lift() -> Iterator[None]:
    global _lifted
    _lifted, before = True, _lifted
    mode = torch.cuda.get_sync_debug_mode() if torch.cuda.is_initialized() else None
    if mode is not None:
        torch.cuda.set_sync_debug_mode("default")
    try:
        yield
    finally:
        _lifted = before
        if mode is not None:
            torch.cuda.set_sync_debug_mode(mode)


def _excuse(name: str) -> None:
    """Replace SGLang's function by one that runs without the guard."""
    owner_path, _, attribute = SYMBOLS[name].path.rpartition(".")
    owner = pkgutil.resolve_name(owner_path)
    original = getattr(owner, attribute)
    if getattr(original, "excused", False):
        return

    @functools.wraps(original)
    def unguarded(*args: Any, **kwargs: Any) -> Any:
        with _lift():
            return original(*args, **kwargs)

    unguarded.excused = True  # type: ignore[attr-defined]
    setattr(owner, attribute, unguarded)


def sync_guard(device: torch.device | str) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """A context for the part of a step that must not wait: with SGLANG_DFLASH_FORBID_SYNC=1 it warns, with 2 it raises.

    Raises:
        DFlashError: the variable holds anything else.
    """
    value = os.environ.get(SWITCH, "")
    if value not in ("", "0", "1", "2"):
        raise DFlashError(f"{SWITCH}={value!r}", expected="0, 1, 2, or unset", remedy=f"unset {SWITCH}")
    if value in ("", "0"):
        return contextlib.nullcontext
    for name in EXCUSED:
        _excuse(name)
    raises = value == "2"
    if torch.device(device).type == "cuda":
        return functools.partial(_watch_cuda, "error" if raises else "warn")
    return functools.partial(_watch_host, _raise if raises else _warn)
