"""A model's files: small ones, safetensors headers, single tensors, and the folder that SGLang loads from."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sglang_dflash.drafter.dequantise import MODELOPT, set_aside
from sglang_dflash.drafter.formats import plain_form
from sglang_dflash.errors import DFlashError

MASK_EMBEDDING = "mask_embedding.pt"
LARGEST = 64 << 20  # bytes; the largest tokenizers have half of that


def inside(folder: Path, name: str) -> Path | None:
    """The path of a model's file; None if there is no such file.

    A link may lead to the blobs of the Hugging Face hub's cache, whose snapshots are made of links, and anywhere from a
    folder that this package made (:func:`views`).

    Raises:
        DFlashError: it lies, or a link leads, outside the folder.
    """
    try:
        path = folder / name
        if not path.is_file():
            return None
        real = path.resolve()
        own = folder.resolve()
        is_inside = real.is_relative_to(own) or own.is_relative_to(views().resolve())
    except (OSError, RuntimeError, ValueError) as error:  # a name that no file can have, a loop of links
        raise _unreadable(folder / name, str(error)) from None
    if is_inside or (real.parent.name == "blobs" and real.parent.parent.name.startswith("models--")):
        return path
    raise DFlashError(
        f"{path} leads out of the model's folder, to {real}",
        expected="a model whose files lie in its folder",
        remedy="copy the file there, or name the folder that the link leads to",
    )


def views() -> Path:
    """The folder of the plain forms that SGLang loads drafters from, with links to their weights."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglang-dflash" / "drafters"


def read_text(file: Path) -> str:
    """A text file's content.

    Raises:
        DFlashError: it cannot be read, is too large, or is not UTF-8.
    """
    try:
        is_small, is_regular = file.stat().st_size <= LARGEST, file.is_file()
        # Reading a pipe would wait for its writer.
        text = file.read_text(encoding="utf-8") if is_small and is_regular else ""
    except (OSError, ValueError) as error:  # not UTF-8, or a name that no file can have
        raise _unreadable(file, getattr(error, "strerror", None) or str(error)) from None
    if not is_small:
        raise _unreadable(file, f"more than {LARGEST >> 20} MiB")
    if not is_regular:
        raise _unreadable(file, "not a regular file")
    return text


def read_object(file: Path) -> dict[str, Any]:
    """A JSON file's content.

    Raises:
        DFlashError: as :func:`read_text`, or it holds something else than a JSON object.
    """
    return parse_object(read_text(file), str(file))


def parse_object(text: str | bytes, about: str) -> dict[str, Any]:
    """A JSON object.

    Args:
        about: what holds the text, for the error.

    Raises:
        DFlashError: it is none.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is a ValueError too
        raise _broken(f"{about} is not JSON ({error})") from None
    if not isinstance(found, dict):
        raise _broken(f"{about} holds a {type(found).__name__}")
    return found


def _unreadable(file: Path, reason: str) -> DFlashError:
    return DFlashError(
        f"{file} cannot be read ({reason})",
        expected=f"a text file of up to {LARGEST >> 20} MiB",
        remedy="check the path and its permissions, or download the model again",
    )


def _broken(found: str) -> DFlashError:
    return DFlashError(found, expected="a JSON object", remedy="correct it, or download the model again")


INDEX = "model.safetensors.index.json"
# A dtype's name holds the bits of an element (``BF16``, ``F8_E4M3``), but for ``BOOL``.
_DTYPE = re.compile(r"BOOL|[A-Z]{1,2}([0-9]{1,2})(?:_[A-Z0-9]+)?")
_NAMES = ("BF16", "F16", "F32", "F64", "F8_E4M3", "F8_E5M2", "I8", "I32", "I64", "BOOL")
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)
_TORCH = dict(zip(_NAMES, (*_FLOATS, torch.int8, torch.int32, torch.int64, torch.bool), strict=True))


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
        """Bytes as stored."""
        found = _DTYPE.fullmatch(self.dtype)
        return self.numel * (int(found[1]) if found and found[1] else 8) // 8

    def empty(self) -> Tensor:
        """The tensor on the meta device: uint8, if its dtype is one that no served weight has."""
        return torch.empty(self.shape, dtype=_TORCH.get(self.dtype, torch.uint8), device="meta")


def read_folder(folder: Path) -> dict[str, TensorHeader]:
    """Every tensor of a folder's safetensors files: those that its index names, or all.

    Raises:
        DFlashError: a header is not one, claims what its file does not hold, or the index names a file that is missing.
    """
    merged: dict[str, TensorHeader] = {}
    for file in _shards(folder):
        merged.update(read_header(file))
    return merged


def _shards(folder: Path) -> list[Path]:
    index = inside(folder, INDEX)
    names = {path.name for path in folder.glob("*.safetensors")}
    if index is not None:
        places = read_object(index).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
            raise _unusable(index, "has no weight_map of file names")
        # SGLang joins these to the folder: a name with a path in it could be any file of the machine.
        if strange := sorted(set(places.values()) - names):
            raise _unusable(index, f"names {strange[0]!r}, which is no safetensors file of the model's folder")
        names = set(places.values())
    return [path for name in sorted(names) if (path := inside(folder, name)) is not None]


def read_header(file: Path) -> dict[str, TensorHeader]:
    """8 bytes of length, little-endian, then JSON, then the data that its offsets point into.

    Raises:
        DFlashError: it is something else.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(size - 8, LARGEST):  # a length is believed only as far as the file goes
                raise _unusable(file, f"claims a header of {length} bytes in a file of {size}")
            header = parse_object(stream.read(length), f"the header of {file}")
    except (OSError, struct.error) as error:
        raise _unusable(file, f"has no header ({error})") from None
    data = size - 8 - length
    tensors = {name: _tensor(file, name, entry, data) for name, entry in header.items() if name != "__metadata__"}
    if (stored := sum(tensor.num_bytes for tensor in tensors.values())) != data:
        raise _unusable(file, f"holds {data} bytes of tensors where its header describes {stored}")
    return tensors


def _tensor(file: Path, name: str, entry: Any, data: int) -> TensorHeader:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]}:
            sizes = all(isinstance(each, int) and not isinstance(each, bool) and 0 <= each < 1 << 48 for each in shape)
            if sizes and len(shape) <= 8 and _DTYPE.fullmatch(dtype) and 0 <= begin <= end <= data:
                tensor = TensorHeader(dtype, tuple(shape))
                if tensor.num_bytes == end - begin:
                    return tensor
    raise _unusable(file, f"describes {name!r} as {str(entry)[:200]}, which it does not hold")


def _unusable(file: Path, problem: str) -> DFlashError:
    return DFlashError(
        f"{file} {problem}",
        expected="a complete safetensors checkpoint",
        remedy="download the model again: the file is damaged, cut short or of another format",
    )


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


_WEIGHTS = ".safetensors"
_COPIED = (".json", ".jinja", ".txt", ".model", MASK_EMBEDDING)


def plain_view(files: ModelFiles) -> Path | None:
    """The folder to load a drafter from; None if the drafter's own is plain.

    A drafter on the hub is downloaded first, as SGLang would do later.

    Raises:
        DFlashError: the trainer's form cannot be served, a file leads out of the drafter's folder, or the view cannot
            be written.
    """
    if files.config == files.published:
        return None
    source = _snapshot(files)
    names = sorted(file.name for file in source.iterdir() if file.name.endswith((_WEIGHTS, *_COPIED)))
    # SGLang would build quantised layers from Model Optimizer's file.
    names = [name for name in names if inside(source, name) and not (files.dequantise and name == MODELOPT)]
    # Another content is another folder: one that a server loads from never changes.
    content = [str(source.resolve()), files.config, [(name, (source / name).stat().st_mtime_ns) for name in names]]
    view = views() / hashlib.sha256(json.dumps(content).encode()).hexdigest()[:24]
    if not view.is_dir():
        try:
            _write(view, source, names, files)
        except OSError as error:
            raise DFlashError(
                f"{view} cannot be written ({error.strerror or error})",
                expected="a folder for the plain form of a drafter that another trainer wrote",
                remedy="set XDG_CACHE_HOME to a folder that can be written",
            ) from None
    return view


def _write(view: Path, source: Path, names: list[str], files: ModelFiles) -> None:
    view.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=view.parent) as folder:
        draft = Path(folder) / "view"
        draft.mkdir()
        for name in names:
            if name.endswith(_WEIGHTS):
                (draft / name).symlink_to((source / name).resolve())
            else:
                shutil.copyfile(source / name, draft / name)
        (draft / "config.json").write_text(json.dumps(files.config, indent=2), encoding="utf-8")
        try:
            draft.rename(view)
        except OSError:
            if not view.is_dir():  # else another server has just written the same
                raise


def _snapshot(files: ModelFiles) -> Path:
    if files.is_local:
        return Path(files.name)
    from huggingface_hub import snapshot_download

    patterns = [f"*{suffix}" for suffix in (_WEIGHTS, *_COPIED)]
    return Path(snapshot_download(files.name, revision=files.revision, allow_patterns=patterns))


def load_config(path: str | Path) -> dict[str, Any]:
    """Read ``config.json`` of a local model directory.

    Raises:
        DFlashError: the file is missing, leads out of the directory, or is not a JSON object.
    """
    file = inside(Path(path), "config.json")
    if file is None:
        raise DFlashError(
            f"{Path(path) / 'config.json'} does not exist",
            expected="a model directory",
            remedy="check the model's path",
        )
    return read_object(file)
