"""Lists the copies from host to device that a step makes inside the no-sync guard, by the line that asks for them.

On a CPU every tensor lives on "cpu", so where one would live on a GPU is told from where it came: a tensor made inside
the guard without naming a device is the host's, so are the batch's fields ``*_cpu`` and everything computed from such
tensors alone; every other tensor is the device's. What that hides: a host tensor of another origin, made before the
guard; memory that is pinned or not; and what the CPU platform replaces (Triton metadata, graph buffers).
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dflash_test_plugin.probe import FOLDER

FILE = "host_copies.json"
_FROM_LISTS = {torch.tensor, torch.as_tensor, torch.asarray}
_INDEXING = {Tensor.__getitem__, Tensor.__setitem__}
# With a device tensor, a host tensor of one element is an argument of the kernel; these copy it all the same.
_COPIES_ONE = {Tensor.copy_, Tensor.__setitem__, torch.cat, torch.stack}
_OURS = ("sglang_dflash/", "sglang_dflash_cpu/")
_SGLANG = "sglang/srt/"
_found: defaultdict[str, set[str]] = defaultdict(set)


class Copies(TorchFunctionMode):
    """Notes each call that copies host data to the device."""

    def __init__(self, host: list[Tensor]) -> None:
        super().__init__()
        self._host = {_storage(tensor): tensor for tensor in host}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = list(_tensors((args, kwargs)))
        host = [tensor for tensor in tensors if _storage(tensor) in self._host]
        names_device = _names_device(func, args, kwargs)
        if func is Tensor.new_tensor or (func in _FROM_LISTS and names_device and not tensors):
            _note("from a list")
        elif func in (Tensor.to, Tensor.cuda) and names_device and (host or kwargs.get("non_blocking")):
            _note("to")
        elif func in _INDEXING and _has_list(args[1]):
            _note("list as index")
        elif len(host) < len(tensors) and any(t.dim() or func in _COPIES_ONE for t in host):
            _note("host tensor among the device's")
        result = func(*args, **kwargs)
        stays = tensors and len(host) == len(tensors) and not names_device
        made = not tensors and not names_device
        for tensor in _tensors(result):
            if stays or made:
                self._host[_storage(tensor)] = tensor
            elif names_device:
                self._host.pop(_storage(tensor), None)  # on a CPU it may be the same memory
        return result


def record(original: Callable[..., Any], worker: Any, batch: Any, *rest: Any) -> Any:
    """Around ``DFlashWorker._decode``: look into whatever it guards."""
    guard = worker._no_sync
    known = [batch, batch.spec_info, worker._rings]
    fields = [(name, x) for each in known for name, x in _fields(each) if isinstance(x, Tensor)]
    # What the scheduler has sent to the device is the same memory here.
    sent = {_storage(x) for name, x in fields if "_cpu" not in name}
    host = [x for name, x in fields if "_cpu" in name and _storage(x) not in sent]

    @contextlib.contextmanager
    def watched() -> Iterator[None]:
        with guard(), Copies(host):
            yield

    worker._no_sync = watched
    try:
        return original(worker, batch, *rest)
    finally:
        worker._no_sync = guard


def _note(what: str) -> None:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (name := _place(frame)) is None:
        frame = frame.f_back
    if frame is not None and name is not None:
        if frame.f_code.co_name == "async_h2d":
            what, frame = "async_h2d", frame.f_back
            assert frame is not None
        where = f"{_place(frame)} {frame.f_code.co_name}: {what}"
        if str(frame.f_lineno) not in _found[where]:
            _found[where].add(str(frame.f_lineno))
            (FOLDER / FILE).write_text(json.dumps({key: sorted(lines) for key, lines in _found.items()}))


def _place(frame: FrameType) -> str | None:
    """The file, if it is the package's or SGLang's."""
    path = frame.f_code.co_filename
    for part in (*_OURS, _SGLANG):
        if f"/{part}" in path:
            return part + path.rpartition(f"/{part}")[2]
    return None


def _names_device(func: Any, args: Any, kwargs: Any) -> bool:
    moved = args[1:] if func is Tensor.to else ()
    return kwargs.get("device") is not None or any(isinstance(a, str | torch.device) for a in moved)


def _has_list(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, list) or type(part).__name__ == "ndarray" for part in parts)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _fields(value: Any) -> list[tuple[str, Any]]:
    return list(vars(value).items()) if hasattr(value, "__dict__") else []


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
