"""Raise inside a decode step where a GPU would make the host wait for the device.

On CUDA PyTorch's sync debug mode does. On a CPU such a call costs nothing, so two modes watch for it here:
reading a value back (``.item()``, ``.tolist()``, ``if tensor:``, ``torch.equal``), and a shape that depends on values
(``nonzero``, ``unique``, a boolean mask as an index).

Not seen: ``x[mask] = value`` with a one-element value that a device would hold, and what only a watch over memory sees
(``tests/rehearsal/refusals.py``): ``.cpu()``, ``.numpy()``, copies from memory that is not pinned.
"""

from __future__ import annotations

import contextlib
import pkgutil
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# PyTorch's own classification of operators: these return a value to the host, or a shape that depends on values.
_WAITING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
_MASKS = (torch.bool, torch.uint8)


class HostSync(RuntimeError):
    """A step would have waited for the device."""


# SGLang's functions that wait inside a step: the first one for a hybrid target, one step after a request ends; the
# others without CUDA graphs, or for a drafter with sliding layers through FlashInfer.
EXCUSED = (
    "sglang.srt.speculative.spec_utils.set_mamba_track_indices_from_reqs",
    "sglang.srt.layers.attention.flashinfer_backend.FlashInferIndicesUpdaterPrefill.call_begin_forward",
    "sglang.srt.layers.attention.flashinfer_backend.FlashInferIndicesUpdaterDecode.call_begin_forward",
)
STEP = "sglang_dflash.worker.worker.DFlashWorker._decode"


def install() -> None:
    """Make a wait inside a decode step of our worker raise, but not inside SGLang's own functions."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(STEP, watched, HookType.AROUND)


def watched(decode: Callable[..., Any], worker: Any, batch: Any, *others: Any) -> Any:
    device = torch.device(batch.device).type
    guard = cuda_debug_mode if device == "cuda" else debug_mode
    for path in EXCUSED:
        owner_path, _, attribute = path.rpartition(".")
        excuse(pkgutil.resolve_name(owner_path), attribute, guard)
    # grammars and custom processors run on the host, which waits for the drafts
    waits = batch.has_grammar or batch.sampling_info.has_custom_logit_processor
    with contextlib.nullcontext() if waits else guard("error"):
        return decode(worker, batch, *others)


@contextlib.contextmanager
def cuda_debug_mode(mode: str) -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def excuse(owner: Any, attribute: str, debug_mode: Callable[[str], Any]) -> None:
    """Suspend the guard inside a function of a module or class; do nothing the second time."""
    original = getattr(owner, attribute)
    if hasattr(original, "excused"):
        return

    @wraps(original)
    def unguarded(*args: Any, **kwargs: Any) -> Any:
        with debug_mode("default"):
            return original(*args, **kwargs)

    unguarded.excused = True  # type: ignore[attr-defined]
    setattr(owner, attribute, unguarded)


_suspended = False


@contextlib.contextmanager
def debug_mode(mode: str) -> Iterator[None]:
    """Raise at a wait (mode "error"), or not ("default")."""
    global _suspended
    before, _suspended = _suspended, mode == "default"
    watched = [_WatchMethods(), _WatchOps()] if not _suspended else []
    try:
        with contextlib.ExitStack() as stack:
            for watch in watched:
                stack.enter_context(watch)
            yield
    finally:
        _suspended = before


class _WatchMethods(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.tolist and not _suspended:  # on a CPU it runs no operator that a mode could see
            raise HostSync("tolist reads a tensor back to the host inside a step")
        return func(*args, **(kwargs or {}))


class EachOperator(TorchDispatchMode):
    """Call ``operator`` in place of every operator that is not a composite of others."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:  # in inference mode composite operators arrive whole: decompose them
            result = func.decompose(*args, **kwargs)
        return self.operator(func, args, kwargs) if result is NotImplemented else result

    def operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError


class _WatchOps(EachOperator):
    def operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not _suspended and waits(func, args, kwargs):
            raise HostSync(f"{func._schema.name} makes the host wait inside a step")
        return func(*args, **kwargs)


def waits(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operator, as a dispatch mode sees it, makes the host wait for a value or for a shape."""
    name = func._schema.name
    if name in _INDEXING:
        masked = any(index is not None and index.dtype in _MASKS for index in args[1])
        return masked and not _fills(args)
    if name == "aten::repeat_interleave":
        return func._overloadname != "self_int" and kwargs.get("output_size") is None
    return not _WAITING.isdisjoint(func.tags)


def _fills(args: Any) -> bool:
    """PyTorch lowers ``x[mask] = scalar`` to ``masked_fill_``, which does not wait on CUDA either."""
    indices = [index for index in args[1] if index is not None]
    return len(args) > 2 and len(indices) == 1 and args[2].numel() == 1 and args[2].device.type == "cpu"
