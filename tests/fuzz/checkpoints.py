"""Safetensors headers, the index of shards, and links that lead out of a model's folder."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from sglang_dflash.check.drafter_files import check_weights
from sglang_dflash.drafter.config import DrafterConfig
from sglang_dflash.drafter.files import ModelFiles
from sglang_dflash.drafter.tensors import expected_shapes
from sglang_dflash.errors import DFlashError
from tests.fuzz.drafters import text
from tests.fuzz.part import Part
from tests.fuzz.values import INTEGERS, damage, dumped, pick, spoil
from tests.support.broken_pairs import Broken, write_pair
from tests.support.configs import drafter, target

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"
SMALL_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
LINKED = (*SMALL_FILES, "model.safetensors", INDEX)
_KEYS = ["dtype", "shape", "data_offsets", "__metadata__", "fc.weight", "norm.weight", "weight_map"]
_NAMES = [
    *("../secret/x.safetensors", "/etc/passwd", "sub/x.safetensors", "..", ".", "", "a\x00b", "x" * 300, "\ud800"),
    *("model.safetensors/../../secret/x.safetensors", "C:\\x", "config.json", "~/x.safetensors", *SHARDS),
]
_LEADS = ("../secret/{}", "/etc/passwd", "{}", "missing", "../model/{}", ".", "/dev/zero", "../secret")


def parts(folder: Path) -> list[Part]:
    return [_header(folder / "header"), _sharded(folder / "sharded"), _linked(folder / "linked")]


def _header(folder: Path) -> Part:
    write_pair(folder, Broken("", ""))
    own, config = folder / "drafter", DrafterConfig.from_dict(drafter())
    whole = (own / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    header, data = json.loads(whole[8 : 8 + length]), whole[8 + length :]
    few = {name: header[name] for name in list(header)[:3]}

    def make(random: Random, values: list[Any]) -> bytes:
        kind = random.random()
        if kind < 0.1:
            return damage(random, whole)
        json_text = (
            text(random, values) if kind < 0.2 else dumped(spoil(random, random.choice((header, few)), _KEYS, values))
        )
        claimed = random.choice(INTEGERS) % (1 << 64) if kind > 0.9 else len(json_text)
        return struct.pack("<Q", claimed) + json_text + random.choice((data, data, b""))

    def write(content: bytes) -> None:
        (own / "model.safetensors").write_bytes(content)

    def read(_: bytes) -> None:
        tensors = ModelFiles(str(own)).tensors
        list(check_weights(config, tensors, target(), "bfloat16"))
        for each in (tensors or {}).values():
            assert 0 <= each.num_bytes <= len(whole)

    return Part("safetensors header", make, read, 10_000, write, folder)


def _sharded(folder: Path) -> Part:
    """Two shards and an index; beside the folder lies a file that is none of its business."""
    own, secret = folder / "model", folder / "secret"
    for path in (own, secret):
        path.mkdir(parents=True)
    names = list(expected_shapes(DrafterConfig.from_dict(drafter())))
    halves = {SHARDS[0]: names[::2], SHARDS[1]: names[1::2]}
    for file, half in halves.items():
        (own / file).write_bytes(_checkpoint(half))
    (own / "config.json").write_text(json.dumps(drafter()))
    (secret / "x.safetensors").write_bytes(_checkpoint(["secret"]))
    index = {
        "metadata": {"total_size": 9},
        "weight_map": {name: file for file, half in halves.items() for name in half},
    }

    def make(random: Random, values: list[Any]) -> bytes:
        kind = random.random()
        if kind < 0.6:
            return dumped(spoil(random, index, _KEYS, [*values, *_NAMES]))
        if kind < 0.8:
            name = random.choice([*_NAMES, pick(random, values)])
            return dumped({**index, "weight_map": {**index["weight_map"], random.choice(names): name}})  # type: ignore[dict-item]
        return damage(random, dumped(index)) if kind < 0.9 else text(random, values)

    def write(content: bytes) -> None:
        (own / INDEX).write_bytes(content)

    def read(_: bytes) -> None:
        tensors = ModelFiles(str(own)).tensors
        assert tensors is None or "secret" not in tensors

    return Part(INDEX, make, read, 6_000, write, own)


def _linked(folder: Path) -> Part:
    """Some of a model's files are links to somewhere else."""
    own, secret = folder / "model", folder / "secret"
    for path in (own, secret):
        path.mkdir(parents=True)
    for file in LINKED:
        content = _checkpoint(["secret"]) if file.endswith(".safetensors") else b'{"secret": true}'
        (secret / file).write_bytes(content)

    def make(random: Random, _: list[Any]) -> dict[str, str]:
        return {random.choice(LINKED): random.choice(_LEADS) for _ in range(random.randint(1, 3))}

    def write(links: dict[str, str]) -> None:
        for file in LINKED:
            (own / file).unlink(missing_ok=True)
        for file, leads in links.items():
            os.symlink(leads.format(file), own / file)

    def read(_: dict[str, str]) -> None:
        files = ModelFiles(str(own))
        may_refuse(lambda: files.config)
        may_refuse(lambda: files.tensors)
        for file in SMALL_FILES:
            may_refuse(lambda file=file: files.json(file))

    return Part("links out of the folder", make, read, 2_000, write, own)


def may_refuse(call: Callable[[], object]) -> None:
    """One of several calls on the same input."""
    try:
        call()
    except DFlashError as error:
        assert error.value.isprintable(), ascii(error.value)


def _checkpoint(names: list[str]) -> bytes:
    """A safetensors file of one float32 zero a tensor."""
    header = {name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i, name in enumerate(names)}
    json_text = json.dumps(header).encode()
    return struct.pack("<Q", len(json_text)) + json_text + bytes(4 * len(names))
