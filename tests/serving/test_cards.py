"""Each published card's command line on a pair of its structure, shrunk (``cards.py``), with random weights."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from sglang_dflash.drafter.config import DrafterConfig
from sglang_dflash.drafter.formats import text_config
from sglang_dflash.drafter.tensors import expected_shapes
from sglang_dflash_lab.train.tokenizer import train_tokenizer
from tests.support.cards import FOLDER, NAMES, VOCAB, card, shrink_drafter, shrink_target
from tests.support.checkpoints import assert_greedy, spread_weights
from tests.support.configs import write_model
from tests.support.files import load_config
from tests.support.generation import answers, flush, tokens
from tests.support.servers import LAUNCH_SERVER, SGLANG_SERVE, Server, running, with_plugin, worker_info

pytestmark = [pytest.mark.engine, pytest.mark.slow]

DTYPE = torch.bfloat16  # of every published pair
NEW_TOKENS = 48
# Added where tokens are compared: in the published bfloat16 a block's forward rounds differently from a token's.
FLOAT32 = ("--dtype", "float32")
RICHEST = "Qwen3.5-4B"  # the card with the most flags, and an exported variable


def build(name: str, folder: Path) -> transformers.PreTrainedModel:
    """Write ``folder/target`` and ``folder/drafter`` for a card; return the target in float32, the reference."""
    torch.manual_seed(0)
    published_target = load_config(FOLDER / name / "target")
    published_drafter = load_config(FOLDER / name / "drafter")
    target = shrink_target(published_target)
    architecture = getattr(transformers, target["architectures"][0])
    model = spread_weights(architecture(architecture.config_class.from_dict(target)))
    with torch.no_grad():  # round the weights but not the RoPE frequencies, which are buffers
        for parameter in model.parameters():
            parameter.copy_(parameter.to(DTYPE))
    copy.deepcopy(model).to(DTYPE).save_pretrained(folder / "target")
    # Restore the published keys: transformers 5 moves some to where SGLang 0.5.23 does not look, such as Qwen3-Next's
    # RoPE base.
    (folder / "target" / "config.json").write_text(json.dumps(target, indent=2))
    _write_tokenizer(folder / "target", multimodal="vision_config" in target)
    _write_drafter(shrink_drafter(published_drafter, text_config(published_target)), folder / "drafter")
    return model


def _write_tokenizer(folder: Path, *, multimodal: bool) -> None:
    train_tokenizer(folder, documents=50)
    if multimodal:
        image = {"image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 16, "merge_size": 2}
        (folder / "preprocessor_config.json").write_text(json.dumps(image))
        video = {**image, "video_processor_type": "Qwen3VLVideoProcessor"}
        (folder / "video_preprocessor_config.json").write_text(json.dumps(video))


def _write_drafter(config: dict[str, Any], folder: Path) -> None:
    shapes = expected_shapes(DrafterConfig.from_dict(config))
    weights = {
        name: (torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * 0.08).to(DTYPE)
        for name, shape in shapes.items()
    }
    write_model(folder, config, weights)


def prompts() -> list[list[int]]:
    """Random tokens; the longest answer crosses SGLang's track boundary of recurrent states, at 256 tokens."""
    draw = random.Random(0)
    return [draw.choices(range(10, VOCAB - 300), k=length) for length in (3, 16, 17, 40, 64, 65, 130, 220)]


def generate(server: Server) -> list[dict[str, Any]]:
    """Send eight requests that arrive together."""
    found = answers(server, prompts(), {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True})
    assert [len(answer["output_ids"]) for answer in found] == [NEW_TOKENS] * 8
    return found


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_the_targets(name: str, tmp_path: Path) -> None:
    target = build(name, tmp_path)
    flags = [*card(name).arguments_for(tmp_path / "target", tmp_path / "drafter"), *FLOAT32]
    oracle = tmp_path / "answers.json"  # drafts are right once it is there: a random drafter's never are
    with running(tmp_path, *flags, **card(name).environment, **with_plugin(tmp_path, "oracle")) as server:
        answers = generate(server)
        oracle.write_text(json.dumps([p + a["output_ids"] for p, a in zip(prompts(), answers, strict=True)]))
        flush(server)
        accepting = generate(server)
    for prompt, answer, again in zip(prompts(), answers, accepting, strict=True):
        assert_greedy(target, prompt, answer["output_ids"])
        assert again["output_ids"] == answer["output_ids"]
    assert 0 < 2 * blocks(accepting) < blocks(answers)


# What the targets' cards append for long texts, shrunk, and its form for a target without ``text_config``.
OLD, FACTOR = 512, 4  # tokens of the context before, and times as many after
_YARN = {"rope_type": "yarn", "rope_theta": 10000000, "factor": FACTOR, "original_max_position_embeddings": OLD}
_MROPE = {"mrope_interleaved": True, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25}
LONG_TEXTS = {
    "Qwen3.5-27B": {"text_config": {"rope_parameters": {**_YARN, **_MROPE}}},
    "Qwen3-Coder-Next": {"rope_scaling": _YARN},
}


@pytest.mark.parametrize("name", LONG_TEXTS)
def test_the_cards_command_for_long_texts(name: str, tmp_path: Path) -> None:
    """Beyond the old context too, as plain decoding with the same override."""
    build(name, tmp_path)
    config = load_config(tmp_path / "target")
    config.get("text_config", config)["max_position_embeddings"] = OLD
    (tmp_path / "target" / "config.json").write_text(json.dumps(config))
    override = ("--json-model-override-args", json.dumps(LONG_TEXTS[name]))
    long = (*FLOAT32, "--context-length", str(FACTOR * OLD), "--max-running-requests", "4")
    allowed = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    draw = random.Random(1)
    asked = [draw.choices(range(10, VOCAB - 300), k=length) for length in (20, 130, OLD - 20, OLD + 200)]
    params = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    plain = []
    for given in ((), override):
        with running(tmp_path, "--model-path", str(tmp_path / "target"), *long, *given, **allowed) as server:
            plain.append(tokens(answers(server, asked, params)))
    without, expected = plain
    assert expected != without
    known = json.dumps([prompt + answer for prompt, answer in zip(asked, expected, strict=True)])
    flags = [*card(name).arguments_for(tmp_path / "target", tmp_path / "drafter"), *long, *override]
    with running(tmp_path, *flags, **card(name).environment, **allowed, **with_plugin(tmp_path, "oracle")) as server:
        (tmp_path / "answers.json").write_text(known)
        found = answers(server, asked, params)
        assert worker_info(server)["version"] and f"context_len={FACTOR * OLD}" in server.log
    assert tokens(found) == expected
    assert all(2 * answer["meta_info"]["spec_verify_ct"] < NEW_TOKENS for answer in found)


def blocks(answers: list[dict[str, Any]]) -> int:
    """Blocks that the target verified."""
    return sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)


@pytest.mark.parametrize(("name", "launcher"), [*((name, LAUNCH_SERVER) for name in NAMES), (RICHEST, SGLANG_SERVE)])
def test_the_command_as_printed_serves(name: str, launcher: tuple[str, ...], tmp_path: Path) -> None:
    build(name, tmp_path)
    arguments = card(name).arguments_for(tmp_path / "target", tmp_path / "drafter")
    with running(tmp_path, *arguments, launcher=launcher, **card(name).environment) as server:
        assert all(answer["meta_info"]["spec_verify_ct"] > 0 for answer in generate(server))
        assert worker_info(server)["version"], "another worker served"
        assert "KV Cache is allocated. dtype: torch.bfloat16" in server.log
