"""A drafter's mask embedding is read if it fits the drafter and refused by name otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_dflash.drafter.checkpoint import MASK_EMBEDDING
from sglang_dflash.drafter.config import DrafterConfig
from sglang_dflash.drafter.tensors import LARGEST_EMBEDDING, load_mask_embedding
from sglang_dflash.errors import DFlashError
from tests.support.configs import drafter

CONFIG = DrafterConfig.from_dict(drafter())


def saved(folder: Path, **changes: Any) -> Path:
    content = {"embedding": torch.arange(64.0), "mask_token_id": 900, **changes}
    torch.save(content, folder / MASK_EMBEDDING)
    return folder / MASK_EMBEDDING


def test_none_without_the_file() -> None:
    assert load_mask_embedding(None, CONFIG) is None


def test_reads_the_embedding(tmp_path: Path) -> None:
    embedding = load_mask_embedding(saved(tmp_path, per_position=False), CONFIG)
    assert embedding is not None
    assert embedding.tolist() == list(range(64))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"mask_token_id": 899}, "mask_token_id 899"),
        ({"per_position": True}, "one embedding per position"),
        ({"embedding": torch.zeros(15, 64)}, r"shape \[15, 64\]"),
        ({"embedding": [0.0] * 64}, "cannot be read"),
    ],
)
def test_refuses_the_embedding_of_another_drafter(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(DFlashError, match=named):
        load_mask_embedding(saved(tmp_path, **changes), CONFIG)


def test_refuses_a_file_of_another_format(tmp_path: Path) -> None:
    (tmp_path / MASK_EMBEDDING).write_bytes(b"not a checkpoint")
    with pytest.raises(DFlashError, match="cannot be read"):
        load_mask_embedding(tmp_path / MASK_EMBEDDING, CONFIG)


@pytest.mark.parametrize(
    "embedding",
    [torch.full((64,), float("nan")), torch.zeros(64, dtype=torch.int32), torch.zeros(64).to_sparse()],
    ids=["NaN", "integers", "sparse"],
)
def test_refuses_unusable_numbers(tmp_path: Path, embedding: torch.Tensor) -> None:
    with pytest.raises(DFlashError, match="finite floating-point numbers"):
        load_mask_embedding(saved(tmp_path, embedding=embedding), CONFIG)


def test_refuses_entries_of_other_types(tmp_path: Path) -> None:
    for changes in ({"mask_token_id": "900"}, {"mask_token_id": None}, {"per_position": torch.ones(3)}):
        with pytest.raises(DFlashError):
            load_mask_embedding(saved(tmp_path, **changes), CONFIG)
    torch.save([1, 2], tmp_path / MASK_EMBEDDING)
    with pytest.raises(DFlashError, match="holds a list"):
        load_mask_embedding(tmp_path / MASK_EMBEDDING, CONFIG)


def test_refuses_a_large_file(tmp_path: Path) -> None:
    file = saved(tmp_path, more=torch.zeros(LARGEST_EMBEDDING // 4))
    with pytest.raises(DFlashError, match="is larger than 16 MiB"):
        load_mask_embedding(file, CONFIG)
