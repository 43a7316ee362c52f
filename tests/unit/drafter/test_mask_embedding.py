"""A drafter's own mask embedding: read where it fits the drafter, refused by name where it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_dflash.drafter.config import DrafterConfig
from sglang_dflash.drafter.mask_embedding import FILE, load_mask_embedding
from sglang_dflash.errors import DFlashError
from tests.support.configs import drafter

CONFIG = DrafterConfig.from_dict(drafter())


def saved(folder: Path, **changes: Any) -> Path:
    content = {"embedding": torch.arange(64.0), "mask_token_id": 900, **changes}
    torch.save(content, folder / FILE)
    return folder / FILE


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
def test_refuses_another_drafters(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(DFlashError, match=named):
        load_mask_embedding(saved(tmp_path, **changes), CONFIG)


def test_refuses_what_is_no_such_file(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"not a checkpoint")
    with pytest.raises(DFlashError, match="cannot be read"):
        load_mask_embedding(tmp_path / FILE, CONFIG)
