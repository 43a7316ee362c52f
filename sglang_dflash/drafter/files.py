"""A model's small files and safetensors headers, from a directory or the Hugging Face hub; never weights."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sglang_dflash.drafter.config import load_config
from sglang_dflash.drafter.headers import TensorHeader, read_folder
from sglang_dflash.drafter.quantisation import MODELOPT, set_aside
from sglang_dflash.drafter.reading import inside, read_object
from sglang_dflash.drafter.trainers import plain_form
from sglang_dflash.errors import DFlashError

__all__ = ["ModelFiles", "TensorHeader"]


@dataclass(frozen=True)
class ModelFiles:
    """A model by local path or hub id.

    Attributes:
        name: directory, or ``organisation/model`` on the hub (read through its local cache first).
        revision: branch, tag or commit on the hub.
        dequantise: whether :attr:`config` is one of plain layers, whose quantised weights are dequantised.
    """

    name: str
    revision: str | None = None
    dequantise: bool = False

    @property
    def is_local(self) -> bool:
        try:
            return Path(self.name).is_dir()
        except OSError:  # longer than a path can be
            return False

    @cached_property
    def config(self) -> dict[str, Any]:
        """``config.json``, in the plain form if another trainer or a quantising tool wrote it.

        Raises:
            DFlashError: there is none, the hub cannot be reached, or the trainer's form cannot be served.
        """
        config = dict(plain_form(self.published))
        return set_aside(config, self.json(MODELOPT)) if self.dequantise else config

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
            DFlashError: the hub refuses the model; the hub cannot be reached, and its cache neither holds the file nor
                records that the model lacks it; or the file leads out of the model's folder.
        """
        if self.is_local:
            return inside(Path(self.name), file)
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, HFValidationError, LocalEntryNotFoundError

        try:
            return Path(hf_hub_download(self.name, file, revision=self.revision))
        except LocalEntryNotFoundError as error:  # an EntryNotFoundError too
            if self._cache_records_absence(file):
                return None
            raise self._unreachable(file) from error
        except EntryNotFoundError:
            return None
        except (HFValidationError, OSError, ValueError) as error:
            raise self._not_found(file) from error

    def json(self, file: str) -> dict[str, Any] | None:
        """A JSON file's content; None if the model does not have it.

        Raises:
            DFlashError: as :meth:`path`, or it is no JSON object.
        """
        path = self.path(file)
        return None if path is None else read_object(path)

    @cached_property
    def tensors(self) -> dict[str, TensorHeader] | None:
        """Every tensor's dtype and shape; None if there is no safetensors file, or the hub cannot be reached.

        Raises:
            DFlashError: a local file does not hold what its header describes.
        """
        if self.is_local:
            return read_folder(Path(self.name)) or None
        if config := self.path("config.json"):
            with suppress(DFlashError):  # of some files the cache has only the names; the hub has their headers
                if cached := read_folder(config.parent):
                    return cached
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

    def _cache_records_absence(self, file: str) -> bool:
        """The hub's cache marks a file that a download did not find; a snapshot's download stores the full listing."""
        from huggingface_hub import _CACHED_NO_EXIST, get_cached_repo_tree, try_to_load_from_cache
        from huggingface_hub.errors import CachedRepoTreeNotFoundError

        if try_to_load_from_cache(self.name, file, revision=self.revision) is _CACHED_NO_EXIST:
            return True
        try:
            listing = get_cached_repo_tree(self.name, revision=self.revision)
        except CachedRepoTreeNotFoundError:
            return False
        return all(entry.path != file for entry in listing)

    def _unreachable(self, file: str) -> DFlashError:
        from huggingface_hub import try_to_load_from_cache

        config = try_to_load_from_cache(self.name, "config.json", revision=self.revision)
        if not isinstance(config, str):
            return self._not_found(file)
        revision = f" --revision {self.revision}" if self.revision else ""
        return DFlashError(
            f"{file} of {self.name} is not in the local cache, and the hub cannot be reached",
            expected="the file, or the cache's record that the model has no such file",
            remedy=f"run `hf download {self.name}{revision}` once where the hub can be reached; or, if "
            f"{Path(config).parent} holds every file of the model, pass that folder in place of the id",
        )

    def _not_found(self, file: str) -> DFlashError:
        return DFlashError(
            f"no {file} found for {self.name}",
            expected="a model directory, or a hub id that can be reached or is in the local cache",
            remedy="check the path or id; for a gated model log in with `hf auth login`",
        )
