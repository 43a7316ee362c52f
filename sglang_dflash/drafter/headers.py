"""Headers of safetensors files: what they claim is held against the file before anybody computes with it."""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sglang_dflash.drafter.reading import LARGEST, inside, parse_object, read_object
from sglang_dflash.errors import DFlashError

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
