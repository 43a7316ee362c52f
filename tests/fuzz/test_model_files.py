"""A model's folder is a download: no code in it runs, no name leads out, and every size is checked before use."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_dflash.drafter import tensors
from sglang_dflash.drafter.checkpoint import INDEX, MAX_BYTES, ModelFiles
from sglang_dflash.drafter.config import DrafterConfig
from sglang_dflash.launch.device import CPU
from sglang_dflash.launch.launch import Launch
from sglang_dflash.launch.published import accept_lengths, other_target, published_pairs
from sglang_dflash.launch.rules import judge
from sglang_dflash.launch.width_config import read_config, widths_for
from tests.fuzz.judge import judged
from tests.fuzz.values import DEEP, HUGE, INTEGERS, LONG_NUMBER, VALUES, dumped, fuzz, json_files
from tests.support.broken_pairs import Broken, write_pair, write_tensors
from tests.support.configs import CONFIGURATIONS, DRAFTER, TEXT, WEIGHTS, launch_of, settings
from tests.support.files import load_config, raise_first_error

OF_TRAINERS, DRAFTERS = (
    [json.loads(file.read_text()) for file in sorted(Path(__file__).parents[1].glob(f"fixtures/{folder}/config.json"))]
    for folder in ("trainers/*", "cards/*/drafter")
)
CONFIG = DrafterConfig.from_dict(DRAFTER)
TENSOR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
NAMES = [
    "../../secret/model.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", "a\0b", "\ud800", "config.json",
]  # fmt: skip
TOKENIZER = {"added_tokens": [{"id": 900, "content": "<mask>"}], "model": {"vocab": {"a": 0}}}
WIDTHS = [{"widths": [1, 4, 16]}, {}, {"8": {"candidate_steps": [3]}}]


def packed(header: bytes, claimed: int | None = None, data: int = 8) -> bytes:
    """A safetensors file whose header claims a length."""
    return struct.pack("<Q", len(header) if claimed is None else claimed % (1 << 64)) + header + bytes(data)


def read_drafter(model: Path) -> None:
    config = load_config(model)
    tensors.expected_shapes(DrafterConfig.from_dict(config))
    list(judge(launch_of(config, dtype="bfloat16"), CONFIGURATIONS))


def read_tensors(model: Path) -> None:
    found = ModelFiles(str(model)).tensors or {}
    assert "secret" not in found and all(0 <= each.num_bytes < 1 << 20 for each in found.values())
    launch = launch_of(DRAFTER, dtype="bfloat16")
    vars(launch.drafter_files).update(tensors=found)
    list(judge(launch, WEIGHTS))


def read_tokenizer(model: Path) -> None:
    given = settings(dtype="bfloat16", model_path=str(model), speculative_draft_model_path=str(model))
    launch = Launch.of(given, CPU)
    vars(launch).update(drafter=CONFIG)
    raise_first_error([*judge(launch, TEXT)])


def read_widths(model: Path) -> None:
    assert all(1 <= width <= 16 for width in widths_for(read_config(str(model / "width.json")), 16))


HEADERS = json_files([{"a": TENSOR, "__metadata__": {}}, {"fc.weight": TENSOR}])
MAP = {"weight_map": dict.fromkeys("ab", "model.safetensors")}
# File -> how the package reads it, and its hostile contents.
FILES: dict[str, tuple[Callable[[Path], None], st.SearchStrategy[bytes]]] = {
    "config.json": (read_drafter, json_files([DRAFTER, *DRAFTERS, *OF_TRAINERS])),
    "model.safetensors": (read_tensors, st.builds(packed, HEADERS, st.none() | st.sampled_from(INTEGERS))),
    INDEX: (read_tensors, json_files([MAP], VALUES | st.sampled_from(NAMES))),
    "tokenizer.json": (read_tokenizer, json_files([TOKENIZER])),
    "width.json": (read_widths, json_files(WIDTHS)),  # the operator's, in the same folder here
}

EMPTY = {"data_offsets": [0, 0], "shape": [0, 1 << 62]}  # no bytes stand behind the large size
ENTRIES: list[dict[str, Any]] = [
    {"shape": [HUGE]}, {"shape": [HUGE, HUGE, 0]}, {"shape": [-2]}, {"shape": [2.0]}, {"shape": 2}, {"dtype": 32},
    {"dtype": "F" + "9" * 5000}, {"data_offsets": [0, HUGE]}, {"data_offsets": [8, 0]}, {"data_offsets": None},
]  # fmt: skip
MAPS = [{}, {"weight_map": ["a"]}, *({"weight_map": {"a": name}} for name in [*NAMES, 5, "missing.safetensors"])]
BROKEN_JSON = [DEEP.encode(), f'{{"seed": {LONG_NUMBER}}}'.encode(), b"\xff", b"[]", b"{"]
# Found by fuzzing: each once passed, or raised another error.
FOUND: list[tuple[str, bytes]] = [
    *((file, content) for file in FILES if file.endswith(".json") for content in BROKEN_JSON),
    *(("model.safetensors", packed(dumped({"a": TENSOR | changes}))) for changes in ENTRIES),
    *(("model.safetensors", packed(dumped({"a": TENSOR}), data=size)) for size in (7, 9)),
    ("model.safetensors", packed(dumped({"a": TENSOR | EMPTY}), data=0)),
    *(("model.safetensors", content) for content in (b"", b"1234567", packed(b"{}", HUGE), packed(DEEP.encode()))),
    *((INDEX, dumped(index)) for index in MAPS),
    *(("tokenizer.json", dumped({"added_tokens": added})) for added in ([5], [{"id": "a", "content": []}])),
]


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """A rule imports SGLang when it is first read, and the cards are read once; the memory of that is not a file's."""
    list(judge(launch_of(DRAFTER, dtype="bfloat16"), CONFIGURATIONS))
    for target, card in published_pairs().items():
        assert accept_lengths(card, 16) and other_target(card["drafter"], target) is None


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A drafter next to its target, and files elsewhere that must not be read."""
    write_pair(tmp_path / "model", Broken("", ""))
    (tmp_path / "secret").mkdir()
    write_tensors(tmp_path / "secret", {"secret": (1,)})
    for file in FILES.keys() - {"model.safetensors"}:
        (tmp_path / "secret" / file).write_text("{}")
    return tmp_path / "model" / "drafter"


@pytest.mark.parametrize("file", FILES)
@fuzz
@given(data=st.data())
def test_a_file(model: Path, file: str, data: st.DataObject) -> None:
    read, contents = FILES[file]
    (model / file).write_bytes(data.draw(contents))
    with judged(model):
        read(model)


@pytest.mark.parametrize(("file", "content"), FOUND, ids=lambda value: ascii(value)[:50])
def test_a_file_that_must_be_refused(model: Path, file: str, content: bytes) -> None:
    (model / file).write_bytes(content)
    with judged(model, refuse=True):
        FILES[file][0](model)


PLANTS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "folder": os.mkdir,
    "loop": lambda path: path.symlink_to(path),
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "large": lambda path: (path.touch(), os.truncate(path, MAX_BYTES + 1)),
}


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("file", sorted(FILES.keys() - {"width.json"}))
def test_a_file_that_is_not_the_models(file: str, plant: str, model: Path) -> None:
    """Reading does not block; an optional file may count as missing."""
    (model / file).unlink(missing_ok=True)
    PLANTS[plant](model / file)
    with judged(model, refuse=plant == "large" or file == "config.json"):
        FILES[file][0](model)
