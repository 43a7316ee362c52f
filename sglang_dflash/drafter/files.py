"""A model's small files and safetensors headers, from a directory or the Hugging Face hub; never weights."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sglang_dflash.drafter.config import load_config
from sglang_dflash.drafter.trainers import plain_form
from sglang_dflash.errors import DFlashError


@dataclass(frozen=True)
class TensorHeader:
    """One tensor as a safetensors header describes it."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes as stored; the dtype's name holds the bits of an element (``BF16``, ``F8_E4M3``), but for ``BOOL``."""
        bits = re.search(r"\d+", self.dtype)
        return self.numel * (int(bits[0]) if bits else 8) // 8


@dataclass(frozen=True)
class ModelFiles:
    """A model by local path or hub id.

    Attributes:
        name: directory, or ``organisation/model`` on the hub (read through its local cache first).
        revision: branch, tag or commit on the hub.
    """

    name: str
    revision: str | None = None

    @property
    def is_local(self) -> bool:
        return Path(self.name).is_dir()

    @cached_property
    def config(self) -> dict[str, Any]:
        """``config.json``, in the plain form if another trainer wrote it.

        Raises:
            DFlashError: there is none, the hub cannot be reached, or the trainer's form cannot be served.
        """
        return dict(plain_form(self.published))

    @cached_property
    def published(self) -> dict[str, Any]:
        """``config.json`` as its trainer wrote it.

        Raises:
            DFlashError: there is none, or the hub cannot be reached.
        """
        path = self.path("config.json")
        if path is None:
            raise self._not_found("config.json")
        return load_config(path.parent)

    def path(self, file: str) -> Path | None:
        """Local path of one small file, downloaded if need be; None if the model does not have it.

        Raises:
            DFlashError: the hub refuses the model, or cannot be reached.
        """
        if self.is_local:
            local = Path(self.name) / file
            return local if local.is_file() else None
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, HFValidationError

        try:
            return Path(hf_hub_download(self.name, file, revision=self.revision))
        except EntryNotFoundError:
            return None
        except (HFValidationError, OSError) as error:
            raise self._not_found(file) from error

    def json(self, file: str) -> dict[str, Any] | None:
        """A JSON file's content; None if the model does not have it."""
        path = self.path(file)
        return None if path is None else json.loads(path.read_text(encoding="utf-8"))

    @cached_property
    def tensors(self) -> dict[str, TensorHeader] | None:
        """Every tensor's dtype and shape; None if no safetensors header can be read."""
        config = self.path("config.json")
        stored = sorted(config.parent.glob("*.safetensors")) if config else []
        if stored or self.is_local:
            merged: dict[str, TensorHeader] = {}
            for file in stored:
                merged.update(_parse(_header(file)))
            return merged or None
        from httpx import TransportError
        from huggingface_hub import get_safetensors_metadata
        from huggingface_hub.errors import HFValidationError, NotASafetensorsRepoError

        try:
            metadata = get_safetensors_metadata(self.name, revision=self.revision)
        except (HFValidationError, NotASafetensorsRepoError, TransportError, OSError):
            return None
        return {
            name: TensorHeader(str(info.dtype), tuple(info.shape))
            for file in metadata.files_metadata.values()
            for name, info in file.tensors.items()
        }

    def _not_found(self, file: str) -> DFlashError:
        return DFlashError(
            f"no {file} found for {self.name}",
            expected="a model directory, or a hub id that can be reached or is in the local cache",
            remedy="check the path or id; for a gated model log in with `hf auth login`",
        )


def _header(file: Path) -> Mapping[str, Any]:
    """The JSON header of a safetensors file: 8 bytes of length, little-endian, then the text."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        return json.loads(stream.read(length))


def _parse(header: Mapping[str, Any]) -> dict[str, TensorHeader]:
    return {
        name: TensorHeader(entry["dtype"], tuple(entry["shape"]))
        for name, entry in header.items()
        if name != "__metadata__"
    }
