"""The embedding that a drafter was trained to see in place of the target's row for the mask token."""

from __future__ import annotations

import pickle
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sglang_dflash.drafter.config import DrafterConfig
from sglang_dflash.errors import DFlashError

FILE = "mask_embedding.pt"
LARGEST = 16 << 20  # bytes
# What the readers of archives and of PyTorch's format raise on damaged ones.
_DAMAGED = (ArithmeticError, AssertionError, AttributeError, EOFError, ImportError, LookupError, NotImplementedError,
            OSError, RuntimeError, struct.error, TypeError, ValueError, zlib.error)  # fmt: skip


def load_mask_embedding(file: Path | None, config: DrafterConfig) -> Tensor | None:
    """Read ``mask_embedding.pt``, which some trainers of DFlash drafters write beside the weights.

    The target's own row is often an unused one, which nothing ever trained.

    Args:
        file: where it is; None if the checkpoint has none.
        config: the drafter's.

    Returns:
        [H], in the dtype of the file; None if the checkpoint has none.

    Raises:
        DFlashError: the file cannot be read, or was made for something else than ``config``.
    """
    if file is None:
        return None
    saved = _read(file)
    embedding, token_id, per_position = (saved.get(key) for key in ("embedding", "mask_token_id", "per_position"))
    if not isinstance(embedding, Tensor) or not isinstance(token_id, int):
        raise _unusable(file, "cannot be read (an entry is missing)", "a dict of embedding and mask_token_id")
    shape = tuple(embedding.shape)
    if per_position is not None and per_position is not False:
        raise _unusable(file, "has one embedding per position of the block", "one for all mask tokens")
    if token_id != config.mask_token_id:
        expected = f"mask_token_id {config.mask_token_id}, as in config.json"
        raise _unusable(file, f"was trained with mask_token_id {token_id}", expected)
    if shape != (config.hidden_size,):
        raise _unusable(file, f"holds a tensor of shape {list(shape)}", f"[{config.hidden_size}], the hidden size")
    plain = embedding.layout == torch.strided and embedding.device.type == "cpu" and embedding.is_floating_point()
    if not plain or not embedding.float().isfinite().all():
        raise _unusable(file, f"holds {embedding.dtype} numbers", "finite floating-point numbers")
    return embedding


def _read(file: Path) -> dict[str, Any]:
    """The file's content, in PyTorch's restricted reading, which makes tensors and plain values only.

    PyTorch believes what the file says of its sizes. So only the archives that ``torch.save`` writes are read, and no
    more than they hold: in its older format, and in a compressed archive, a small file can ask for any memory.
    """
    expected = f"what torch.save writes of an embedding, up to {LARGEST >> 20} MiB"
    try:
        is_plain = _is_plain(file)
        saved = torch.load(file, map_location="cpu", weights_only=True) if is_plain else None
    except (*_DAMAGED, zipfile.BadZipFile, pickle.UnpicklingError) as error:
        raise _unusable(file, f"cannot be read ({str(error)[:200]})", expected) from None
    if not is_plain:
        raise _unusable(file, "is compressed or too large", expected)
    if not isinstance(saved, dict):
        raise _unusable(file, f"holds a {type(saved).__name__}", "a dict of embedding and mask_token_id")
    return saved


def _is_plain(file: Path) -> bool:
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
    return stored and sum(entry.file_size for entry in entries) <= LARGEST


def _unusable(file: Path, problem: str, expected: str) -> DFlashError:
    return DFlashError(f"{file} {problem}", expected=expected, remedy="download the drafter again, or ask its authors")
