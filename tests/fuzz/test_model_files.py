"""What fuzzing found in the reading of a model's files: each case made an exception of another kind, or worse."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.check.tokens import check_tokens
from sglang_dflash.drafter import reading
from sglang_dflash.drafter.config import DrafterConfig, load_config
from sglang_dflash.drafter.files import ModelFiles
from sglang_dflash.drafter.headers import INDEX
from sglang_dflash.drafter.tensors import LoadReport
from sglang_dflash.errors import DFlashError
from tests.support.broken_pairs import write_tensors
from tests.support.configs import drafter

HUGE = 1 << 60
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "original_max_position_embeddings": 4096}
SMALL = 8 << 20  # bytes

CONFIGS: list[dict[str, Any]] = [
    {"architectures": 5},
    {"num_hidden_layers": HUGE},
    {"num_hidden_layers": 10**9},
    {"hidden_size": HUGE},
    {"max_position_embeddings": 1 << 40},
    {"rms_norm_eps": float("nan")},
    {"rms_norm_eps": float("inf")},
    {"rms_norm_eps": 10**400},
    {"rope_theta": float("nan")},
    {"partial_rotary_factor": "half"},
    {"partial_rotary_factor": float("inf")},
    {"rope_parameters": {"rope_theta": 1e4, "rope_type": ["yarn"]}},
    {"rope_parameters": {**YARN, "factor": 1e12}},
    {"torch_dtype": ["float32"]},
]


@pytest.mark.parametrize("changes", CONFIGS, ids=lambda changes: json.dumps(changes)[:60])
def test_a_key_that_no_drafter_has(changes: dict[str, Any]) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(DFlashError):
            DrafterConfig.from_dict(drafter(**changes))
        assert tracemalloc.get_traced_memory()[1] < SMALL
    finally:
        tracemalloc.stop()


def fifo(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.write_text("[" * 100_000),
        lambda path: path.write_text('{"a": 1' + "0" * 5000 + "}"),
        lambda path: path.write_bytes(b"\xff"),
        lambda path: path.mkdir(),
        lambda path: path.symlink_to(path),
        lambda path: path.symlink_to("/dev/zero"),
        fifo,
    ],
    ids=["deep", "long number", "no UTF-8", "a folder", "a link to itself", "endless", "a pipe"],
)
def test_a_config_that_is_none(make: Callable[[Path], object], tmp_path: Path) -> None:
    make(tmp_path / "config.json")
    with pytest.raises(DFlashError):
        load_config(tmp_path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    fifo(tmp_path / "width.json")
    with pytest.raises(DFlashError, match="not a regular file"):
        reading.read_object(tmp_path / "width.json")


def test_a_file_larger_than_any_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(reading.LARGEST + 1)
    with pytest.raises(DFlashError, match="more than 64 MiB"):
        load_config(tmp_path)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model, and beside it what is none of its business."""
    folder = tmp_path / "model"
    for path in (folder, tmp_path / "secret"):
        path.mkdir()
        (path / "config.json").write_text(json.dumps(drafter()))
        write_tensors(path, {path.name: (2,)})
    return folder


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_link_out_of_the_folder_is_not_followed(file: str, model: Path) -> None:
    (model.parent / "secret" / "tokenizer.json").write_text("{}")
    (model / file).unlink(missing_ok=True)
    (model / file).symlink_to(f"../secret/{file}")
    files = ModelFiles(str(model))
    with pytest.raises(DFlashError, match="leads out of the model's folder"):
        _ = files.config, files.tensors, files.json(file)


def test_links_that_are_followed(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Within the folder, to the hub's blobs, and from a folder of links that this package made."""
    (model / "b.json").symlink_to("config.json")
    assert ModelFiles(str(model)).json("b.json") == drafter()
    (model.parent / "linked").symlink_to(model)
    assert ModelFiles(str(model.parent / "linked")).tensors
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "0123").write_text("{}")
    (model / "c.json").symlink_to(blobs / "0123")
    assert ModelFiles(str(model)).json("c.json") == {}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    view = reading.views() / "0"
    view.mkdir(parents=True)
    (view / "model.safetensors").symlink_to(model / "model.safetensors")
    assert ModelFiles(str(view)).tensors


def header(text: bytes, length: int | None = None, data: int = 0) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(data)


def entry(**changes: Any) -> bytes:
    tensor = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}
    return json.dumps({"a": tensor}).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234567",
        header(b"{}", length=HUGE),
        header(b"{}", length=3),
        header(b"[]"),
        header(b"[" * 100_000),
        header(b"\xff"),
        header(b'{"a": 1}'),
        header(b'{"a": {"dtype": "F32"}}'),
        header(entry(shape=[HUGE]), data=8),
        header(entry(shape=[HUGE, HUGE, 0]), data=8),
        header(entry(shape=[-2]), data=8),
        header(entry(shape=[2.0]), data=8),
        header(entry(shape=2), data=8),
        header(entry(dtype=32), data=8),
        header(entry(dtype="F" + "9" * 5000), data=8),
        header(entry(data_offsets=[0, HUGE]), data=8),
        header(entry(data_offsets=[8, 0]), data=8),
        header(entry(), data=7),
        header(entry(), data=9),
    ],
    ids=lambda content: ascii(content)[2:60],
)
def test_a_header_that_the_file_does_not_bear_out(content: bytes, model: Path) -> None:
    (model / "model.safetensors").write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(DFlashError, match=r"model\.safetensors"):
            _ = ModelFiles(str(model)).tensors
        assert tracemalloc.get_traced_memory()[1] < SMALL
    finally:
        tracemalloc.stop()


def test_an_honest_header_is_read(model: Path) -> None:
    (model / "model.safetensors").write_bytes(header(entry(), data=8))
    tensors = ModelFiles(str(model)).tensors
    assert tensors is not None and tensors["a"].num_bytes == 8


@pytest.mark.parametrize(
    "index",
    [
        {"weight_map": {"a": "../secret/model.safetensors"}},
        {"weight_map": {"a": "/etc/passwd"}},
        {"weight_map": {"a": "sub/model.safetensors"}},
        {"weight_map": {"a": "model-00002-of-00002.safetensors"}},
        {"weight_map": {"a": "config.json"}},
        {"weight_map": {"a": 5}},
        {"weight_map": ["a"]},
        {},
    ],
    ids=json.dumps,
)
def test_an_index_of_files_that_are_not_the_models(index: dict[str, Any], model: Path) -> None:
    (model / INDEX).write_text(json.dumps(index))
    with pytest.raises(DFlashError, match=INDEX):
        _ = ModelFiles(str(model)).tensors


def test_an_index_chooses_among_the_files(model: Path) -> None:
    (model / "consolidated.safetensors").write_bytes(b"another format")
    (model / INDEX).write_text(json.dumps({"weight_map": {"model": "model.safetensors"}}))
    assert set(ModelFiles(str(model)).tensors or ()) == {"model"}


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", b"[]"),
        ("tokenizer.json", b"{"),
        ("tokenizer.json", b'{"added_tokens": [5]}'),
        ("tokenizer.json", b'{"added_tokens": [{"id": "a", "content": []}]}'),
        ("tokenizer_config.json", b"[]"),
        ("chat_template.jinja", b"\xff"),
    ],
)
def test_small_files_that_are_damaged(file: str, content: bytes, model: Path) -> None:
    (model / file).write_bytes(content)
    files = ModelFiles(str(model))
    levels = [finding.level for finding in check_tokens(DrafterConfig.from_dict(drafter()), files, files, None)]
    assert "error" in levels


def test_a_name_longer_than_a_path_is_no_model() -> None:
    pytest.importorskip("huggingface_hub")
    with pytest.raises(DFlashError, match="no config.json found"):
        _ = ModelFiles("a" * 5000).config


def test_tensors_are_looked_up_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A header may hold a hundred thousand names, and a drafter a thousand layers."""
    calls = []
    report = LoadReport({f"{i}.weight": (1,) for i in range(100)}, quantized=False)
    key = LoadReport._key
    monkeypatch.setattr(LoadReport, "_key", lambda self, name: (calls.append(name), key(self, name))[1])
    for i in range(100):
        report.accepts(f"{i}.weight", (1,))
    assert len(calls) <= 200
