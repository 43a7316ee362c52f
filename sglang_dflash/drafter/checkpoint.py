"""A model's files, from a folder or the Hugging Face hub.

Models are untrusted downloads, so sizes are checked before files are read.
"""

import hashlib
import json
import math
import os
import re
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import huggingface_hub as hub
import torch
from httpx import Timeout, TransportError
from huggingface_hub import constants, errors
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sglang_dflash.drafter.formats import plain_form
from sglang_dflash.drafter.quantisation import MODELOPT, declared
from sglang_dflash.errors import DFlashError

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
MASK_EMBEDDING = "mask_embedding.pt"
TOKENIZER = "tokenizer.json"
MAX_BYTES = 64 << 20  # bytes

_READ = [CONFIG, INDEX, MODELOPT, MASK_EMBEDDING, TOKENIZER]
_WEIGHTS = ".safetensors"
_LINKED = (_WEIGHTS, ".json", ".jinja", ".txt", ".model", MASK_EMBEDDING)
_BITS = re.compile(r"[A-Z]+([0-9]+)")  # in a dtype's name; BOOL has none
_TORCH_DTYPES = {
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8, "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip


@dataclass(frozen=True)
class TensorHeader:
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        bits = _BITS.match(self.dtype)
        return self.numel * (int(bits[1]) if bits else 8) // 8

    def empty(self) -> Tensor:
        """On the meta device, uint8 for a dtype that no served weight has."""
        return torch.empty(self.shape, dtype=_TORCH_DTYPES.get(self.dtype, torch.uint8), device="meta")


@dataclass(frozen=True)
class ModelFiles:
    """A model by local path or hub id; ``revision`` is a branch, tag or commit on the hub."""

    name: str
    revision: str | None = None

    @property
    def is_local(self) -> bool:
        return os.path.isdir(self.name)  # Path.is_dir raises for an impossible name

    @cached_property
    def config(self) -> dict[str, Any]:
        """``config.json`` in the plain form; errors as in :func:`plain_form`."""
        return dict(plain_form(self.published))

    @cached_property
    def published(self) -> dict[str, Any]:
        """``config.json`` as its trainer wrote it; DFlashError if it is missing or no JSON object."""
        config = self.json(CONFIG)
        if config is None:
            raise self._not_found()
        return config

    @cached_property
    def quantisation(self) -> Mapping[str, Any] | None:
        """As the files declare it, or None."""
        return declared(self.published, self.json(MODELOPT))

    @cached_property
    def folder(self) -> Path:
        """The model's folder, for a hub id its snapshot in the local cache; DFlashError without one."""
        if self.is_local:
            return Path(self.name)
        problem = hub_problem()
        try:
            return Path(hub.snapshot_download(self.name, revision=self.revision, allow_patterns=_READ,
                                              local_files_only=problem is not None))  # fmt: skip
        except errors.IncompleteSnapshotError as error:
            raise self._unreachable(problem or "files are missing", error.snapshot_path) from error
        except errors.LocalEntryNotFoundError as error:
            raise self._unreachable(problem or str(error.__cause__).partition("\n")[0]) from error
        except (errors.HFValidationError, TransportError, OSError, ValueError) as error:
            raise self._not_found() from error

    def path(self, file: str) -> Path | None:
        """Return the path of one small file, or None."""
        path = self.folder / file
        if path.is_file():
            return path
        if not self.is_local:
            try:
                hub.get_cached_repo_tree(self.name, revision=self.revision)
            except errors.CachedRepoTreeNotFoundError as error:  # offline, and the snapshot may lack the file
                raise self._unreachable(hub_problem() or "files are not listed", self.folder) from error
        return None

    def json(self, file: str) -> dict[str, Any] | None:
        path = self.path(file)
        return None if path is None else read_object(path)

    @cached_property
    def tensors(self) -> dict[str, TensorHeader] | None:
        """Header of every tensor; None without a safetensors file or hub; DFlashError for a damaged local file."""
        if self.is_local:
            return self._headers() or None
        with suppress(DFlashError):  # the hub has the headers of missing shards
            if cached := self._headers():
                return cached
        if hub_problem():
            return None
        try:
            files = hub.get_safetensors_metadata(self.name, revision=self.revision).files_metadata.values()
        except (errors.HFValidationError, errors.SafetensorsParsingError, errors.NotASafetensorsRepoError,
                TransportError, OSError):  # fmt: skip
            return None
        found = (tensor for file in files for tensor in file.tensors.items())
        return {name: TensorHeader(str(info.dtype), tuple(info.shape)) for name, info in found}

    @cached_property
    def index(self) -> dict[str, Any] | None:
        file = self.folder / INDEX
        return read_object(file) if file.is_file() else None

    def _headers(self) -> dict[str, TensorHeader]:
        files = sorted(file for file in self.folder.glob(f"*{_WEIGHTS}") if file.is_file())
        if self.index is not None:
            shards, index = self.index.get("weight_map"), self.folder / INDEX
            if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
                raise _unreadable(index, "has no weight_map of file names")
            # SGLang joins the names to the folder, so a path could name any file of the machine
            if strange := sorted(set(shards.values()) - {file.name for file in files}):
                problem = f"names {strange[0]!r}, which is no safetensors file of the model's folder"
                raise _unreadable(index, problem)
            files = [file for file in files if file.name in shards.values()]
        return {name: header for file in files for name, header in _read_header(file).items()}

    def _unreachable(self, problem: str, folder: Path | str = "its snapshot") -> DFlashError:
        revision = f" --revision {self.revision}" if self.revision else ""
        return DFlashError(
            f"the hub cannot be reached ({problem}), and {self.name} is neither a folder nor complete in the cache",
            remedy=f"run `hf download {self.name}{revision}` where the hub can be reached (HF_ENDPOINT names another "
            f"hub), or pass a local folder in place of the id ({folder}, if it holds every file)",
        )

    def _not_found(self) -> DFlashError:
        return DFlashError(
            f"no {CONFIG} found for {self.name}",
            remedy="check the path or id; for a gated model log in with `hf auth login`",
        )


@cache
def hub_problem() -> str | None:
    """Return why the hub cannot be reached, or None. Behind a firewall the hub's client would wait forever."""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        # any answer will do
        hub.get_session().head(constants.ENDPOINT, timeout=Timeout(5, connect=2), follow_redirects=False)
    except (TransportError, OSError) as error:
        return f"{constants.ENDPOINT}: {error}"
    return None


def plain_view(files: ModelFiles) -> Path | None:
    """Return the folder from which SGLang loads a drafter in another form, or None if its own folder is plain.

    The folder, in this user's cache, holds the plain ``config.json`` and links to the other files: transformers does
    not support other forms.

    Raises:
        DFlashError: the trainer's form cannot be served, or the folder cannot be written.
    """
    if files.config == files.published:
        return None
    source = files.folder
    if not files.is_local:
        patterns = [f"*{suffix}" for suffix in _LINKED]
        source = Path(hub.snapshot_download(files.name, revision=files.revision, allow_patterns=patterns))
    others = (file for file in source.iterdir() if file.name.endswith(_LINKED) and file.name != CONFIG)
    linked = sorted(file for file in others if file.is_file())
    # another content gets another folder: a server may still load from this one
    stamps = [(file.name, file.stat().st_mtime_ns) for file in linked]
    content = json.dumps([str(source.resolve()), files.config, stamps])
    views = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglang-dflash" / "drafters"
    view = views / hashlib.sha256(content.encode()).hexdigest()[:24]
    try:
        if not view.is_dir():
            _write_view(view, linked, files.config)
    except OSError as error:
        raise DFlashError(
            f"{view} cannot be written ({error.strerror or error})",
            remedy="set XDG_CACHE_HOME to a folder that can be written",
        ) from None
    return view


def _write_view(view: Path, linked: list[Path], config: dict[str, Any]) -> None:
    view.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=view.parent) as folder:
        draft = Path(folder) / "view"
        draft.mkdir()
        for file in linked:
            (draft / file.name).symlink_to(file.resolve())
        (draft / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
        try:
            draft.rename(view)
        except OSError:
            if not view.is_dir():  # otherwise another server has just written it
                raise


def read_text(file: Path) -> str:
    """Read a regular UTF-8 file of up to :data:`MAX_BYTES` bytes; anything else is a DFlashError."""
    problem = f"is no regular file of up to {MAX_BYTES >> 20} MiB"
    try:
        if file.is_file() and file.stat().st_size <= MAX_BYTES:  # reading a pipe would block
            return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # not UTF-8, or an impossible name
        problem = f"cannot be read ({getattr(error, 'strerror', None) or error})"
    raise _unreadable(file, problem)


def read_object(file: Path) -> dict[str, Any]:
    return parse_object(read_text(file), str(file))


def parse_object(text: str | bytes, source: str) -> dict[str, Any]:
    """Parse a JSON object; anything else is a DFlashError that names ``source``."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError also for thousands of digits
        raise _unreadable(source, f"is not JSON ({error})") from None
    if not isinstance(found, dict):
        raise _unreadable(source, f"holds a {type(found).__name__}, not a JSON object")
    return found


def _read_header(file: Path) -> dict[str, TensorHeader]:
    try:
        with safe_open(file, framework="np") as stored:  # compares the header with the file's size
            slices = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118
            tensors = {name: TensorHeader(each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()}
    except (SafetensorError, OSError, ValueError) as error:  # ValueError: an impossible name
        raise _unreadable(file, f"has no valid header ({str(error)[:200]})") from None
    for name, tensor in tensors.items():
        # an empty tensor's other sizes are not bounded by the file's size
        if len(tensor.shape) > 8 or math.prod(max(size, 1) for size in tensor.shape) >> 48:
            raise _unreadable(file, f"describes {name!r} with the impossible shape {list(tensor.shape)[:9]}")
    return tensors


def _unreadable(source: object, problem: str) -> DFlashError:
    remedy = "check the path and its permissions; if the file is damaged or cut short, download the model again"
    return DFlashError(f"{source} {problem}", remedy=remedy)
