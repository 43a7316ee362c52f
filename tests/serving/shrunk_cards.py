"""The published pairs, shrunk (``cards.py``), with random weights in the published dtype, and requests to them."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from sglang_dflash.drafter.config import DrafterConfig, load_config, text_config
from sglang_dflash.drafter.tensors import expected_shapes
from sglang_dflash_lab.train.tokenizer import train_tokenizer
from tests.support.cards import FOLDER, VOCAB, shrink_drafter, shrink_target
from tests.support.checkpoints import spread_weights
from tests.support.generation import answers
from tests.support.pair_servers import worker_info
from tests.support.servers import Server

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
    model = spread_weights(_model(target))
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


def _model(config: dict[str, Any]) -> transformers.PreTrainedModel:
    name = config["architectures"][0]
    stem = name.removesuffix("ForConditionalGeneration").removesuffix("ForCausalLM")
    config_class = getattr(transformers, f"{stem}Config")
    return getattr(transformers, name)(config_class.from_dict(config))


def _write_tokenizer(folder: Path, *, multimodal: bool) -> None:
    train_tokenizer(folder, documents=50)
    if multimodal:
        image = {"image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 16, "merge_size": 2}
        (folder / "preprocessor_config.json").write_text(json.dumps(image))
        video = {**image, "video_processor_type": "Qwen3VLVideoProcessor"}
        (folder / "video_preprocessor_config.json").write_text(json.dumps(video))


def _write_drafter(config: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    shapes = expected_shapes(DrafterConfig.from_dict(config))
    weights = {
        name: (torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * 0.08).to(DTYPE)
        for name, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def prompts() -> list[list[int]]:
    """Random tokens; the longest answer crosses SGLang's track boundary of recurrent states, at 256 tokens."""
    draw = random.Random(0)
    return [draw.choices(range(10, VOCAB - 300), k=length) for length in (3, 16, 17, 40, 64, 65, 130, 220)]


def generate(server: Server) -> list[dict[str, Any]]:
    """Send eight requests that arrive together."""
    found = answers(server, prompts(), {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True})
    assert [len(answer["output_ids"]) for answer in found] == [NEW_TOKENS] * 8
    return found


def assert_served_here(found: list[dict[str, Any]], server: Server) -> None:
    """Assert that our worker drafted and verified, in the checkpoint's dtype."""
    assert "serves DFLASH" in server.log
    assert worker_info(server)["version"], "another worker served"
    assert "KV Cache is allocated. dtype: torch.bfloat16" in server.log
    assert all(answer["meta_info"]["spec_verify_ct"] > 0 for answer in found)
