"""A drafter's files: tensors as its configuration states, a mask embedding that fits, and the view of other forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_dflash.drafter.checkpoint import MASK_EMBEDDING, ModelFiles, plain_view
from sglang_dflash.drafter.config import DrafterConfig
from sglang_dflash.drafter.tensors import MAX_EMBEDDING, LoadReport, expected_shapes, load_mask_embedding
from sglang_dflash.errors import DFlashError
from tests.support.configs import drafter, write_model
from tests.support.trainers import config

CONFIG = DrafterConfig.from_dict(drafter())


def test_biases_are_expected_where_the_configuration_states_them() -> None:
    assert not any(name.endswith("bias") for name in expected_shapes(CONFIG))
    with_bias = expected_shapes(DrafterConfig.from_dict(drafter(attention_bias=True)))
    assert {name.split(".")[3] for name in with_bias if name.endswith("bias")} == {f"{each}_proj" for each in "qkvo"}


def test_a_quantised_checkpoint_is_compared_by_module() -> None:
    report = LoadReport(DrafterConfig.from_dict(drafter(quantization_config={"quant_method": "fp8"})))
    names = [name.replace("proj.weight", "proj.weight_packed") for name in expected_shapes(CONFIG)]
    names.remove("layers.1.self_attn.o_proj.weight_packed")
    list(report.place((name, torch.empty(1, device="meta")) for name in names))
    with pytest.raises(DFlashError, match=r"missing: layers\.1\.self_attn\.o_proj[;)]"):
        report.check(complete=True)


EMBEDDING = {"embedding": torch.arange(64.0), "mask_token_id": 900}


def test_a_mask_embedding_is_read_where_there_is_one(tmp_path: Path) -> None:
    torch.save({**EMBEDDING, "per_position": False}, tmp_path / MASK_EMBEDDING)
    embedding = load_mask_embedding(tmp_path / MASK_EMBEDDING, CONFIG)
    assert embedding is not None and embedding.tolist() == list(range(64))
    assert load_mask_embedding(None, CONFIG) is None


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"mask_token_id": 899}, "mask_token_id 899"),
        ({"mask_token_id": "900"}, "mask_token_id 900"),
        ({"mask_token_id": None}, "mask_token_id None"),
        ({"per_position": True}, "one embedding per position"),
        ({"per_position": torch.ones(3)}, "one embedding per position"),
        ({"embedding": torch.zeros(15, 64)}, r"shape \[15, 64\]"),
        ({"embedding": [0.0] * 64}, "cannot be read"),
        ({"embedding": torch.full((64,), float("nan"))}, "finite floating-point numbers"),
        ({"embedding": torch.zeros(64, dtype=torch.int32)}, "finite floating-point numbers"),
        ({"embedding": torch.zeros(64).to_sparse()}, "finite floating-point numbers"),
        ({"more": torch.zeros(MAX_EMBEDDING // 4)}, "is larger than 16 MiB"),
        ([1, 2], "cannot be read"),
        (b"not a checkpoint", "cannot be read"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_mask_embedding_of_another_drafter_or_without_usable_numbers_is_refused(
    tmp_path: Path, content: Any, named: str
) -> None:
    file = tmp_path / MASK_EMBEDDING
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(EMBEDDING | content if isinstance(content, dict) else content, file)
    with pytest.raises(DFlashError, match=named):
        load_mask_embedding(file, CONFIG)


def test_the_view_of_another_trainers_drafter_is_kept_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang loads the drafter from this folder. A cache that cannot be written is an error with its remedy."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = write_model(tmp_path / "drafter", config("automodel"), {"a": torch.zeros(1)})
    first = plain_view(ModelFiles(str(folder)))
    assert first is not None and plain_view(ModelFiles(str(folder))) == first
    assert [entry.name for entry in first.parent.iterdir()] == [first.name]
    write_model(folder, {**config("automodel"), "block_size": 8})
    assert plain_view(ModelFiles(str(folder))) != first
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(DFlashError, match="cannot be written") as error:
        plain_view(ModelFiles(str(folder)))
    assert "XDG_CACHE_HOME" in error.value.remedy
