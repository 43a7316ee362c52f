"""What CUDA refuses, refused on a CPU, with the line that did it.

:class:`tests.rehearsal.streams.Calls` shows every call of PyTorch with the memory of its tensors to :func:`refusal`.

CUDA raises at: pinned memory for an array or a tensor, operands on both sides (but numbers on the host), and ``numpy``
of the device's memory. No code may do that. The host waits, or an asynchronous copy does not, at: an index on the host
for a tensor on the device, a value that is read back, a blocking copy, and a copy from memory that is not pinned. This
package may do that at the places of ``MAY_WAIT`` only; SGLang's own waits are SGLang's.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
from torch import Tensor

OURS, PLANTED = "sglang_dflash/", "tests/rehearsal/test_refusals.py"
START = "worker/start/"  # may wait
# Where this package may wait for the device: "file function" of the calling line, and why.
MAY_WAIT: dict[str, str] = {
    "features/processors.py apply": "custom processors run on the host",
    "features/processors.py wait": "reads a copy after its event",
    "ops/reference/model.py _constant": "once per value",
    "features/ranks.py append_columns": "with SGLang's own row, before a gather that waits",
    "features/ranks.py append_absent": "with SGLang's own row, before a gather that waits",
    "features/copies.py __init__": "at the start",
    "worker/worker.py _build_stages": "at the start",
    "worker/worker.py _build_features": "at the start",
}
# What a GPU does not run, or not on such tensors: "file function".
NOT_ON_A_GPU: dict[str, str] = {"sglang_dflash/model/attention.py _assert_in_table": "a check on a CPU"}

_ERRORS = {"pin", "operands", "numpy"}
_READS = re.compile(r"tolist|item|__(bool|int|float|index|contains)__|equal|allclose|is_nonzero")
_SHAPES = re.compile(r"nonzero|argwhere|unique(_consecutive)?|masked_select|bincount")
_INDEXING = {"__getitem__", "__setitem__", "index_put", "index_put_"}
# A copy may have its tensors on both sides; these read no values.
_BOTH_SIDES = re.compile(r"copy_|to|type_as|.*_like|(expand|view|reshape|resize|broadcast)_as_?|new_.*|set_|__set__")


class Refused(RuntimeError):
    """CUDA raises here, or makes the host wait."""


def refusal(
    watch: Any, func: Any, args: Any, kwargs: Any, given: list[Tensor], on_host: list[bool], target: bool | None
) -> tuple[str, str]:
    """Return the kind of what CUDA refuses in a call, and what it would do; two empty strings if nothing.

    ``given`` are the call's tensors; ``on_host`` says which are the host's. ``target`` is True if the call asks
    for the host's memory, False if for the device's.
    """
    name = getattr(func, "__name__", "")
    if kwargs.get("pin_memory"):
        data = args[0] if args else kwargs.get("data")
        if func is torch.tensor and isinstance(data, Tensor | np.ndarray):
            return "pin", f"Can't pin tensor constructed from {'a variable' if given else 'numpy'}"
        if target is False:
            return "pin", "only dense CPU tensors can be pinned"
    if not given:
        waits = func in (torch.tensor, torch.as_tensor, torch.asarray) and target is False
        return ("copy", f"{name} copies to the device and waits") if waits else ("", "")
    if name in ("numpy", "__array__"):
        return ("", "") if on_host[0] else ("numpy", "can't convert cuda tensor to numpy")
    if name in ("copy_", "to", "cpu"):
        return _of_copy(watch, name, given, on_host, target, bool(kwargs.get("non_blocking")))
    if name in _INDEXING and not on_host[0]:
        return _of_index(watch, name, args, given)
    if all(on_host) or _BOTH_SIDES.fullmatch(name):
        return "", ""
    if any(host and tensor.dim() for host, tensor in zip(on_host, given, strict=True)):
        return "operands", f"{name}: expected all tensors to be on the same device"
    if _READS.fullmatch(name):
        return "read", f"{name} reads the device's memory and waits"
    if func in (torch.tensor, torch.as_tensor, torch.asarray):
        return "read", f"{name} reads the device's numbers and waits"
    if _SHAPES.fullmatch(name) or (
        name == "repeat_interleave" and len(given) > 1 - (func is torch.repeat_interleave) and _no_size(args, kwargs)
    ):
        return "read", f"{name} waits for a shape"
    return "", ""


def _no_size(args: Any, kwargs: Any) -> bool:
    return kwargs.get("output_size") is None and isinstance(args[-1], Tensor)


def _of_copy(
    watch: Any, name: str, given: list[Tensor], on_host: list[bool], target: bool | None, non_blocking: bool
) -> tuple[str, str]:
    destination, source = (on_host[0], on_host[-1]) if name == "copy_" else (target, on_host[0])
    if destination is None or destination == source or (name == "copy_" and len(given) < 2):
        return "", ""
    if not non_blocking:
        return "copy", f"{name} waits for a copy {'to the host' if destination else 'from the host'}"
    host = given[0] if name != "copy_" or destination else given[-1]
    fresh = name != "copy_" and destination  # PyTorch pins it
    if not fresh and not watch.is_pinned(host):
        return (
            "pageable",
            f"{name} with non_blocking copies {'to' if destination else 'from'} memory that is not pinned",
        )
    return "", ""


def _of_index(watch: Any, name: str, args: Any, given: list[Tensor]) -> tuple[str, str]:
    indices = args[1] if isinstance(args[1], tuple) else (args[1],)
    if name in ("index_put", "index_put_"):
        indices = tuple(args[1])
    advanced = [index for index in indices if isinstance(index, Tensor | list | np.ndarray)]
    for index in advanced:
        if not isinstance(index, Tensor) or (index.dim() and watch.on_host(index)):
            return "index", f"{name} copies an index from the host and waits"
        if not index.dim() and not watch.on_host(index) and index.dtype != torch.bool:
            return "read", f"{name} reads an index from the device and waits"
        if index.dtype in (torch.bool, torch.uint8) and not (name != "__getitem__" and _is_number(watch, args)):
            return "read", f"{name} with a mask waits for a shape"
    value = args[2] if len(args) > 2 else None
    if isinstance(value, Tensor) and value.dim() and watch.on_host(value):
        return ("operands" if advanced else "copy"), f"{name} with a value on the host"
    return "", ""


def _is_number(watch: Any, args: Any) -> bool:
    value = args[2]
    return not isinstance(value, Tensor) or (value.numel() == 1 and watch.on_host(value))


def is_refused(kind: str, place: str) -> bool:
    """Whether what CUDA does at a place, ``file:line function``, ends a test."""
    file, _, function = place.rpartition(" ")
    where = f"{file.rpartition(':')[0]} {function}"
    if where.startswith("tests/plugin/") and not where.startswith(PLANTED):
        return False
    if kind in _ERRORS:
        return where not in NOT_ON_A_GPU
    if not where.startswith((OURS, PLANTED)) or where.startswith(OURS + START):
        return False
    return where.removeprefix(OURS) not in MAY_WAIT
