"""A model's files, from a folder or the Hugging Face hub: configuration, safetensors headers and single tensors.

A model is a download. Each file is checked before it is read: it lies in the model's folder, is a regular file and has
a plausible size.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import huggingface_hub as hub
import torch
from httpx import TransportError
from huggingface_hub import errors
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sglang_dflash.drafter.dequantise import MODELOPT, set_aside
from sglang_dflash.drafter.formats import plain_form
from sglang_dflash.errors import DFlashError

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
MASK_EMBEDDING = "mask_embedding.pt"
LARGEST = 64 << 20  # bytes of a text file; the largest tokenizers have half of that

_WEIGHTS = ".safetensors"
_COPIED = (".json", ".jinja", ".txt", ".model", MASK_EMBEDDING)
_BITS = re.compile(r"[A-Z]+([0-9]+)")  # in a dtype's name: BF16, F8_E4M3; BOOL has none
_TORCH_DTYPES = {
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8, "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip


@dataclass(frozen=True)
class TensorHeader:
    """Dtype and shape of one tensor in a safetensors header."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        bits = _BITS.match(self.dtype)
        return self.numel * (int(bits[1]) if bits else 8) // 8

    def empty(self) -> Tensor:
        """The tensor on the meta device, uint8 for a dtype that no served weight has."""
        return torch.empty(self.shape, dtype=_TORCH_DTYPES.get(self.dtype, torch.uint8), device="meta")


@dataclass(frozen=True)
class ModelFiles:
    """A model by local path or hub id.

    Attributes:
        name: folder, or ``organisation/model`` on the hub. The hub's local cache is read first.
        revision: branch, tag or commit on the hub.
        dequantise: whether :attr:`config` describes plain layers although the weights are stored quantised.
    """

    name: str
    revision: str | None = None
    dequantise: bool = False

    @property
    def is_local(self) -> bool:
        try:
            return Path(self.name).is_dir()
        except OSError:  # the name is longer than a path can be
            return False

    @cached_property
    def config(self) -> dict[str, Any]:
        """``config.json`` in the plain form, also if another trainer or a quantising tool wrote it.

        Raises:
            DFlashError: as :attr:`published` and :func:`plain_form`.
        """
        config = dict(plain_form(self.published))
        return set_aside(config, self.json(MODELOPT)) if self.dequantise else config

    @cached_property
    def published(self) -> dict[str, Any]:
        """``config.json`` as its trainer wrote it.

        Raises:
            DFlashError: there is none, the hub cannot be reached, or it is not a JSON object.
        """
        config = self.json(CONFIG)
        if config is None:
            raise self._not_found(CONFIG)
        return config

    def path(self, file: str) -> Path | None:
        """Return the local path of one small file, downloaded if necessary; None if the model has no such file.

        Raises:
            DFlashError: the hub rejects the model; the hub cannot be reached, and its cache neither holds the file nor
                records that the model lacks it; or the file lies outside the model's folder.
        """
        if self.is_local:
            return inside(Path(self.name), file)
        if file not in self._downloaded:
            self._downloaded[file] = self._download(file)
        return self._downloaded[file]

    @cached_property
    def _downloaded(self) -> dict[str, Path | None]:
        return {}  # every file is requested from the hub once

    def _download(self, file: str) -> Path | None:
        try:
            return Path(hub.hf_hub_download(self.name, file, revision=self.revision))
        except errors.LocalEntryNotFoundError as error:  # offline; a subclass of EntryNotFoundError
            if self._cache_records_absence(file):
                return None
            raise self._unreachable(file) from error
        except errors.EntryNotFoundError:
            return None
        except (errors.HFValidationError, OSError, ValueError) as error:
            raise self._not_found(file) from error

    def json(self, file: str) -> dict[str, Any] | None:
        """Return the object in a JSON file at :meth:`path`; None if the model has no such file."""
        path = self.path(file)
        return None if path is None else read_object(path)

    @cached_property
    def tensors(self) -> dict[str, TensorHeader] | None:
        """Header of every tensor; None if there is no safetensors file, or the hub cannot be reached.

        Raises:
            DFlashError: a local file does not hold what its header describes.
        """
        if self.is_local:
            return _headers(Path(self.name)) or None
        with suppress(DFlashError):  # the cache may lack some shards; the hub has their headers
            if (config := self.path(CONFIG)) and (cached := _headers(config.parent)):
                return cached
        try:
            files = hub.get_safetensors_metadata(self.name, revision=self.revision).files_metadata.values()
        except (errors.HFValidationError, errors.SafetensorsParsingError, errors.NotASafetensorsRepoError,
                TransportError, OSError):  # fmt: skip
            return None
        found = (tensor for file in files for tensor in file.tensors.items())
        return {name: TensorHeader(str(info.dtype), tuple(info.shape)) for name, info in found}

    def _cache_records_absence(self, file: str) -> bool:
        # Looking for a file in vain leaves a marker; downloading a snapshot leaves the model's full listing.
        if hub.try_to_load_from_cache(self.name, file, revision=self.revision) is hub._CACHED_NO_EXIST:
            return True
        try:
            listing = hub.get_cached_repo_tree(self.name, revision=self.revision)
        except errors.CachedRepoTreeNotFoundError:
            return False
        return all(entry.path != file for entry in listing)

    def _unreachable(self, file: str) -> DFlashError:
        config = hub.try_to_load_from_cache(self.name, CONFIG, revision=self.revision)
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
    """Single tensors, or rows of them, of a model in a local folder or in the hub's local cache."""

    def __init__(self, files: ModelFiles) -> None:
        config = files.path(CONFIG)
        found = sorted(config.parent.glob(f"*{_WEIGHTS}")) if config else []
        self._files = [path for file in found if (path := inside(file.parent, file.name))]

    def read(self, name: str, rows: Sequence[int] | None = None) -> Tensor | None:
        """Return a tensor or some of its rows; None if no file holds it.

        Args:
            name: end of the tensor's name, from a dot on: multimodal models nest their language model.
            rows: row numbers within the tensor; None for all of it.
        """
        for file in self._files:
            with suppress(SafetensorError, OSError), safe_open(file, framework="pt") as stored:  # the loader reports it
                key = next((key for key in stored.keys() if f".{key}".endswith(f".{name}")), None)  # noqa: SIM118
                if key is None:
                    continue
                if rows is None:
                    return stored.get_tensor(key)
                part = stored.get_slice(key)
                if rows and max(rows) < part.get_shape()[0]:
                    return torch.cat([part[row : row + 1] for row in rows])
        return None


def plain_view(files: ModelFiles) -> Path | None:
    """Write the folder from which SGLang loads a drafter in another trainer's or a quantising tool's form.

    SGLang reads a drafter's configuration in many places, through transformers, which supports neither the classes nor
    the nesting of other trainers. The folder holds the plain ``config.json``, copies of the small files and links to
    the weights. A drafter on the hub is downloaded first, as SGLang would do later.

    Returns:
        The folder, in this user's cache; None if the drafter's own folder is plain.

    Raises:
        DFlashError: the trainer's form cannot be served, a file lies outside the drafter's folder, or the folder cannot
            be written.
    """
    if files.config == files.published:
        return None
    source = Path(files.name)
    if not files.is_local:
        patterns = [f"*{suffix}" for suffix in (_WEIGHTS, *_COPIED)]
        source = Path(hub.snapshot_download(files.name, revision=files.revision, allow_patterns=patterns))
    names = sorted(file.name for file in source.iterdir() if file.name.endswith((_WEIGHTS, *_COPIED)))
    # From Model Optimizer's file SGLang would build quantised layers.
    names = [name for name in names if inside(source, name) and not (files.dequantise and name == MODELOPT)]
    # A folder never changes while a server loads from it: other content gets another folder.
    content = [str(source.resolve()), files.config, [(name, (source / name).stat().st_mtime_ns) for name in names]]
    view = _views() / hashlib.sha256(json.dumps(content).encode()).hexdigest()[:24]
    if not view.is_dir():
        try:
            _write_view(view, source, names, files.config)
        except OSError as error:
            raise DFlashError(
                f"{view} cannot be written ({error.strerror or error})",
                expected="a folder for the plain form of a drafter that another trainer wrote",
                remedy="set XDG_CACHE_HOME to a folder that can be written",
            ) from None
    return view


def _write_view(view: Path, source: Path, names: list[str], config: dict[str, Any]) -> None:
    view.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=view.parent) as folder:
        draft = Path(folder) / "view"
        draft.mkdir()
        for name in names:
            if name.endswith(_WEIGHTS):
                (draft / name).symlink_to((source / name).resolve())
            else:
                shutil.copyfile(source / name, draft / name)
        (draft / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
        try:
            draft.rename(view)
        except OSError:
            if not view.is_dir():  # otherwise another server has just written the same folder
                raise


def _views() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglang-dflash" / "drafters"


def inside(folder: Path, name: str) -> Path | None:
    """Return the path of a model's file; None if there is no such regular file.

    A link may lead to a blob of the Hugging Face hub's cache, whose snapshots consist of links. Links in the folders of
    :func:`plain_view` may lead anywhere.

    Raises:
        DFlashError: the file lies, or a link leads, outside the folder.
    """
    try:
        path = folder / name
        if not path.is_file():
            return None
        real, own = path.resolve(), folder.resolve()
        allowed = real.is_relative_to(own) or own.is_relative_to(_views().resolve())
    except (OSError, RuntimeError, ValueError) as error:  # a name that no file can have, a loop of links
        raise _unreadable(folder / name, str(error)) from None
    if allowed or (real.parent.name == "blobs" and real.parent.parent.name.startswith("models--")):
        return path
    raise DFlashError(
        f"{path} leads out of the model's folder, to {real}",
        expected="a model whose files lie in its folder",
        remedy="copy the file there, or name the folder that the link leads to",
    )


def read_text(file: Path) -> str:
    """Read a regular UTF-8 file of up to :data:`LARGEST` bytes; anything else is a DFlashError."""
    try:
        size, is_regular = file.stat().st_size, file.is_file()
        if is_regular and size <= LARGEST:  # reading a pipe would wait for its writer
            return file.read_text(encoding="utf-8")
        problem = f"more than {LARGEST >> 20} MiB" if is_regular else "not a regular file"
    except (OSError, ValueError) as error:  # not UTF-8, or a name that no file can have
        problem = getattr(error, "strerror", None) or str(error)
    raise _unreadable(file, problem)


def read_object(file: Path) -> dict[str, Any]:
    """Read a JSON object as :func:`read_text` reads text; anything else is a DFlashError."""
    return parse_object(read_text(file), str(file))


def parse_object(text: str | bytes, source: str) -> dict[str, Any]:
    """Parse a JSON object; anything else is a DFlashError that names ``source``."""
    try:
        found = json.loads(text)
        problem = f"holds a {type(found).__name__}"
    except (ValueError, RecursionError) as error:  # ValueError also for a number of thousands of digits
        found, problem = None, f"is not JSON ({error})"
    if not isinstance(found, dict):
        remedy = "correct it, or download the model again"
        raise DFlashError(f"{source} {problem}", expected="a JSON object", remedy=remedy)
    return found


def _headers(folder: Path) -> dict[str, TensorHeader]:
    """Headers of the safetensors files that the folder's index names, or of all."""
    index, names = inside(folder, INDEX), {path.name for path in folder.glob(f"*{_WEIGHTS}")}
    if index is not None:
        shards = read_object(index).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise _damaged(index, "has no weight_map of file names")
        # SGLang joins the names to the folder: a name that contains a path could be any file of the machine.
        if strange := sorted(set(shards.values()) - names):
            raise _damaged(index, f"names {strange[0]!r}, which is no safetensors file of the model's folder")
        names = set(shards.values())
    paths = (inside(folder, name) for name in sorted(names))
    return {name: header for path in paths if path for name, header in _read_header(path).items()}


def _read_header(file: Path) -> dict[str, TensorHeader]:
    try:
        with safe_open(file, framework="np") as stored:  # compares the header with the file's size
            slices = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118
            tensors = {name: TensorHeader(each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()}
    except (SafetensorError, OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise _damaged(file, f"has no valid header ({str(error)[:200]})") from None
    for name, tensor in tensors.items():
        # No bytes stand behind the other sizes of an empty tensor.
        if len(tensor.shape) > 8 or math.prod(max(size, 1) for size in tensor.shape) >> 48:
            raise _damaged(file, f"describes {name!r} with the shape {list(tensor.shape)[:9]}")
    return tensors


def _damaged(file: Path, problem: str) -> DFlashError:
    return DFlashError(
        f"{file} {problem}",
        expected="a complete safetensors checkpoint",
        remedy="download the model again: the file is damaged, cut short or of another format",
    )


def _unreadable(file: Path, problem: str) -> DFlashError:
    return DFlashError(
        f"{file} cannot be read ({problem})",
        expected=f"a text file of up to {LARGEST >> 20} MiB",
        remedy="check the path and its permissions, or download the model again",
    )
