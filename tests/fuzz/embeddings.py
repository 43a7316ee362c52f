"""A drafter's ``mask_embedding.pt``: other contents, damaged files, and archives that claim more than they hold."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from random import Random
from typing import Any

import torch

from sglang_dflash.drafter.config import DrafterConfig
from sglang_dflash.drafter.mask_embedding import FILE, load_mask_embedding
from tests.fuzz.part import Part
from tests.fuzz.values import damage, pick
from tests.support.configs import drafter

_TENSORS = [
    *(torch.zeros(64), torch.zeros(1).expand(1 << 40), torch.zeros(0), torch.tensor(1.0), torch.zeros(64, 2)),
    *(torch.full((64,), float("nan")), torch.zeros(64, dtype=torch.int8), torch.zeros(64, dtype=torch.complex64)),
    *(torch.zeros(64).to_sparse(), torch.zeros(64, device="meta"), torch.zeros(64, dtype=torch.float8_e4m3fn)),
]


def make(random: Random, values: list[Any]) -> bytes:
    content: Any = {"embedding": _TENSORS[0], "mask_token_id": 900, "per_position": False}
    for _ in range(random.randrange(3)):
        content[random.choice(list(content))] = random.choice((random.choice(_TENSORS), pick(random, values)))
    if random.random() < 0.1:
        content = pick(random, values)
    kind = random.random()
    data = _save(content, zipped=kind > 0.1)
    if kind < 0.4:
        return damage(random, data)
    return _inflated(data) if kind < 0.45 else random.randbytes(40) if kind < 0.47 else data


def parts(folder: Path) -> list[Part]:
    folder.mkdir()
    config = DrafterConfig.from_dict(drafter())

    def write(data: bytes) -> None:
        (folder / FILE).write_bytes(data)

    def read(_: bytes) -> None:
        embedding = load_mask_embedding(folder / FILE, config)
        assert embedding is not None and embedding.float().isfinite().all()

    return [Part("mask_embedding.pt", make, read, 2_000, write, folder)]


def _save(content: Any, *, zipped: bool) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, _use_new_zipfile_serialization=zipped)
    return buffer.getvalue()


def _inflated(data: bytes) -> bytes:
    """The same archive with 16 compressed MiB in place of its tensors: some kilobytes that unpack to all of it."""
    if not zipfile.is_zipfile(io.BytesIO(data)):
        return data
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, bytes(1 << 24) if "/data/" in name else old.read(name))
    return buffer.getvalue()
