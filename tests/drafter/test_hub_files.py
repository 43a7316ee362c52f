"""A model's files: in a folder, on the hub, and in the hub's cache without a network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_dflash.drafter import checkpoint
from sglang_dflash.drafter.checkpoint import ModelFiles, TensorHeader
from sglang_dflash.errors import DFlashError
from tests.support.broken_pairs import write_tensors

COMMIT = "0" * 40


def write_listing(cache: Path, *files: str) -> None:
    """What the hub's client writes when it downloads a snapshot."""
    from huggingface_hub._tree_cache import TreeCacheEntry, write_tree_cache

    write_tree_cache(str(cache), COMMIT, {file: TreeCacheEntry(size=1, blob_id="0" * 40) for file in files})


def test_a_hub_that_does_not_answer_is_named_at_once_and_is_not_a_missing_file(tmp_path: Path) -> None:
    nobody = "http://127.0.0.1:9"
    environment = {**os.environ, "HF_ENDPOINT": nobody, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-m", "sglang_dflash.check.cli", "check", "Qwen/tiny", "z-lab/tiny"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 2, ended.stderr
    [problem, fix] = [line for line in ended.stdout.splitlines() if line.startswith(("  x ", "      "))]
    assert f"the hub cannot be reached ({nobody}: " in problem and "Qwen/tiny is neither a folder nor" in problem
    assert "pass a local folder" in fix and "`hf download Qwen/tiny`" in fix


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache of z-lab/tiny, with a configuration and weights, and no hub."""
    constants = pytest.importorskip("huggingface_hub.constants")
    cache = tmp_path / "models--z-lab--tiny"
    snapshot = cache / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(COMMIT)
    (snapshot / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    write_tensors(snapshot, {"a": (2, 3)})
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(checkpoint, "hub_problem", checkpoint.hub_problem.__wrapped__)  # not an earlier answer
    return cache


def test_a_hub_id_is_read_from_the_local_cache(cache: Path) -> None:
    files = ModelFiles("z-lab/tiny")
    assert not files.is_local
    assert files.config == {"model_type": "qwen3"}
    assert files.tensors == {"a": TensorHeader("F32", (2, 3))}
    assert TensorHeader("F4", (4, 2)).num_bytes == 4


@pytest.mark.parametrize("file", ["mask_embedding.pt", "hf_quant_config.json", "tokenizer.json"])
def test_without_the_hub_a_file_is_absent_only_if_the_cache_lists_the_models_files(cache: Path, file: str) -> None:
    """A drafter served without its mask embedding would draft badly without a word."""
    with pytest.raises(DFlashError, match="z-lab/tiny is neither a folder nor complete") as error:
        ModelFiles("z-lab/tiny").path(file)
    assert "`hf download z-lab/tiny`" in error.value.remedy
    folder = cache / "snapshots" / COMMIT
    assert str(folder) in error.value.remedy and ModelFiles(str(folder)).path(file) is None
    write_listing(cache, "config.json", file)
    with pytest.raises(DFlashError, match="z-lab/tiny is neither a folder nor complete"):
        ModelFiles("z-lab/tiny").path(file)


def test_without_the_hub_the_listing_of_a_downloaded_snapshot_shows_what_the_model_lacks(cache: Path) -> None:
    write_listing(cache, "config.json", "model.safetensors")
    assert ModelFiles("z-lab/tiny").path("mask_embedding.pt") is None
    assert ModelFiles("z-lab/tiny").config == {"model_type": "qwen3"}
    with pytest.raises(DFlashError, match=r"\(HF_HUB_OFFLINE is set\), and z-lab/other is neither"):
        ModelFiles("z-lab/other").path("mask_embedding.pt")
