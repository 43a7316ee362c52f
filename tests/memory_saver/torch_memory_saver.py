"""A stand-in for the package of this name, on a CPU: memory that is released holds NaN or 0 when it is resumed.

The real one unmaps the memory that was allocated inside a region, and maps other memory at the same addresses.
``SGLANG_DFLASH_TEST_FOLDER`` receives the bytes of each region, by tag, at each pause.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Recording(TorchDispatchMode):
    """Keeps every tensor that an operation allocates, with what a backup needs of it."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_address(each) for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and each.device.type == "cpu" and _address(each) not in given:
                self.allocated.setdefault(_address(each), each.detach())
        return result


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class MemorySaver:
    enabled = True

    def __init__(self) -> None:
        self._regions: dict[str, list[tuple[torch.Tensor, bool]]] = defaultdict(list)
        self._backups: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    @contextmanager
    def region(self, tag: str, enable_cpu_backup: bool = False) -> Iterator[None]:
        with _Recording() as recording:
            yield
        self._regions[tag] += [(tensor, enable_cpu_backup) for tensor in recording.allocated.values()]

    @torch.inference_mode()
    def pause(self, tag: str) -> None:
        tensors = self._regions[tag]
        self._backups[tag] = [(tensor, tensor.clone()) for tensor, kept in tensors if kept]
        for tensor, _ in tensors:
            tensor.fill_(torch.nan if tensor.is_floating_point() else 0)
        sizes = {name: sum(each.untyped_storage().nbytes() for each, _ in held) for name, held in self._regions.items()}
        if folder := os.environ.get("SGLANG_DFLASH_TEST_FOLDER"):
            Path(folder, "regions.json").write_text(json.dumps(sizes))

    @torch.inference_mode()
    def resume(self, tag: str) -> None:
        for tensor, kept in self._backups.pop(tag):
            tensor.copy_(kept)


torch_memory_saver = MemorySaver()


def configure_subprocess() -> Any:
    return nullcontext()
