"""The folder that SGLang loads another trainer's drafter from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sglang_dflash.drafter.checkpoint import ModelFiles, plain_view
from sglang_dflash.drafter.config import DrafterConfig
from sglang_dflash.errors import DFlashError
from tests.support.trainers import config, plain_config, tensors_of, write, write_target


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def view_of(folder: Path) -> Path:
    view = plain_view(ModelFiles(str(folder)))
    assert view is not None
    return view


def test_holds_the_plain_form_and_the_same_weights(tmp_path: Path) -> None:
    tensors = tensors_of("speculators", write_target(tmp_path / "target"))
    folder = write(tmp_path / "drafter", config("speculators"), tensors)
    (folder / "mask_embedding.pt").write_bytes(b"m")
    (folder / "dflash.py").write_text("raise SystemExit")
    view = view_of(folder)
    written = json.loads((view / "config.json").read_text())
    assert written["architectures"] == ["DFlashDraftModel"] and "speculators_model_type" not in written
    assert DrafterConfig.load(view) == DrafterConfig.load(folder)
    assert {name: tensor.sum() for name, tensor in load_file(view / "model.safetensors").items()} == {
        name: tensor.sum() for name, tensor in tensors.items()
    }
    assert sorted(file.name for file in view.iterdir()) == ["config.json", "mask_embedding.pt", "model.safetensors"]
    # What the worker's process reads of it is no link, and so lies in the model's folder.
    assert ModelFiles(str(view)).path("mask_embedding.pt") == view / "mask_embedding.pt"
    assert json.loads((folder / "config.json").read_text()) == config("speculators")


def test_is_kept_until_the_drafter_changes(tmp_path: Path) -> None:
    folder = write(tmp_path / "drafter", config("automodel"), {"a": torch.zeros(1)})
    first = view_of(folder)
    assert view_of(folder) == first
    assert [entry.name for entry in first.parent.iterdir()] == [first.name]
    (folder / "config.json").write_text(json.dumps({**config("automodel"), "block_size": 8}))
    assert view_of(folder) != first


def test_none_for_a_plain_drafter(tmp_path: Path, cache: Path) -> None:
    folder = write(tmp_path / "drafter", plain_config("automodel"), {"a": torch.zeros(1)})
    assert plain_view(ModelFiles(str(folder))) is None
    assert not cache.exists()


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, cache: Path) -> None:
    cache.write_text("a file")
    folder = write(tmp_path / "drafter", config("automodel"), {"a": torch.zeros(1)})
    with pytest.raises(DFlashError, match="cannot be written") as error:
        plain_view(ModelFiles(str(folder)))
    assert "XDG_CACHE_HOME" in error.value.remedy
