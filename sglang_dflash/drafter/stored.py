"""Single tensors of a checkpoint on this machine, or some rows of one: never a whole embedding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sglang_dflash.drafter.files import ModelFiles
from sglang_dflash.drafter.reading import inside


class StoredTensors:
    """The tensors of a model whose safetensors files are on this machine.

    Args:
        files: a local model, or one of the hub's in the local cache.

    Raises:
        DFlashError: a file leads out of the model's folder.
    """

    def __init__(self, files: ModelFiles) -> None:
        config = files.path("config.json")
        found = sorted(config.parent.glob("*.safetensors")) if config else []
        self._files = [path for file in found if (path := inside(file.parent, file.name))]

    def read(self, name: str, rows: Sequence[int] | None = None) -> Tensor | None:
        """A tensor, or some of its rows.

        Args:
            name: the end of its name, from a dot on: multimodal models nest their language model.
            rows: numbers of rows within the tensor; None for all of it.

        Returns:
            None if no file here has it.
        """
        for file in self._files:
            found = _read(file, name, rows)
            if found is not None:
                return found
        return None


def _read(file: Path, name: str, rows: Sequence[int] | None) -> Tensor | None:
    try:
        with safe_open(file, framework="pt") as stored:
            key = next((key for key in stored.keys() if f".{key}".endswith(f".{name}")), None)  # noqa: SIM118
            if key is None:
                return None
            if rows is None:
                return stored.get_tensor(key)
            part = stored.get_slice(key)
            if not rows or max(rows) >= part.get_shape()[0]:
                return None
            return torch.cat([part[row : row + 1] for row in rows])
    except (SafetensorError, OSError):
        return None  # the loader says what is wrong with it
