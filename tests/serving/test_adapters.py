"""LoRA adapters of the target: answers are plain decoding's with the same adapters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_dflash_lab.pairs import target_path
from tests.support.generation import Answer, flush, generate_all
from tests.support.prompts import corpus
from tests.support.servers import RANDOM_WIDTHS, Server, dflash_server, plain_server

PAIR, RANK, NEW_TOKENS = "tiny-dense", 4, 48
MODULES = ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ADAPTERS = ("first", "second", None)

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def write_adapter(folder: Path, seed: int) -> Path:
    """Write a random adapter in PEFT's format, strong enough to change every answer."""
    draw, tensors = torch.Generator().manual_seed(seed), {}
    for name, weight in load_file(target_path(PAIR) / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        if stem.rpartition(".")[2] in MODULES:
            for part, shape in (("A", (RANK, weight.shape[1])), ("B", (weight.shape[0], RANK))):
                scale = 1.2 * weight.float().std().sqrt().item() / RANK**0.25
                tensors[f"base_model.model.{stem}.lora_{part}.weight"] = scale * torch.randn(shape, generator=draw)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": MODULES, "bias": "none"}
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    folder = tmp_path_factory.mktemp("adapters")
    paths = [f"{name}={write_adapter(folder / name, seed)}" for seed, name in enumerate(filter(None, ADAPTERS))]
    flags = ("--enable-lora", "--max-loras-per-batch", "3", "--lora-paths", *paths)
    with dflash_server(PAIR, folder, *flags, *RANDOM_WIDTHS) as server, plain_server(PAIR, folder, *flags) as plain:
        yield server, plain


def answered(server: Server, concurrency: int) -> list[Answer]:
    flush(server)
    prompts, names = [prompt for prompt in corpus(PAIR, 4) for _ in ADAPTERS], 4 * ADAPTERS
    return generate_all(server, prompts, concurrency, NEW_TOKENS, each=lambda i: {"lora_path": names[i]})


@pytest.mark.parametrize("concurrency", [1, 8])
def test_answers_with_adapters_are_plain_decodings(servers: tuple[Server, Server], concurrency: int) -> None:
    found, expected = (answered(server, concurrency) for server in servers)
    assert [answer.tokens for answer in found] == [answer.tokens for answer in expected]
    texts = [answer.tokens for answer in expected]
    for first, second, base in zip(texts[::3], texts[1::3], texts[2::3], strict=True):
        assert len({tuple(first), tuple(second), tuple(base)}) == 3
    assert sum(answer.meta["spec_verify_ct"] for answer in found) < sum(len(text) for text in texts)
