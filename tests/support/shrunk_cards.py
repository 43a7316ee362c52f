"""The published pairs with every structural key kept and every size shrunk, random weights in the published dtype.

Kept: architecture, the linear/full pattern, experts and how many serve a token, GQA ratios, linear value heads per key
head, the drafter's layer types, causality, RoPE scaling, number and spacing of captured layers, the mask token's
distance from the end of the vocabulary. Shrunk: depth, widths, vocabulary, windows and context.
"""

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
from tests.support.cards import FOLDER
from tests.support.checkpoints import spread_weights
from tests.support.pair_servers import worker_info
from tests.support.servers import Server
from tools.train.tokenizer import train_tokenizer

VOCAB, HIDDEN, HEAD, CONTEXT = 1024, 64, 32, 4096
TARGET_LAYERS = 12  # three repetitions of the 3:1 pattern; room for eight captured layers
DRAFTER_LAYERS = 3
WINDOW = 32
DTYPE = torch.bfloat16  # of every published pair
NEW_TOKENS = 48
EOS = 2  # of the tokenizer that `train_tokenizer` makes
# The one flag added where tokens are compared: in the published bfloat16 a block's forward rounds otherwise than a
# token's, with any worker.
FLOAT32 = ("--dtype", "float32")
RICHEST = "Qwen3.5-4B"  # the card with the most flags, and an exported variable


def build(name: str, folder: Path) -> transformers.PreTrainedModel:
    """Write ``folder/target`` and ``folder/drafter`` for a card; the target comes back in float32: the reference."""
    torch.manual_seed(0)
    published_target = load_config(FOLDER / name / "target")
    published_drafter = load_config(FOLDER / name / "drafter")
    target = shrink_target(published_target)
    model = _model(target).float()
    spread_weights(model)
    _round(model)
    copy.deepcopy(model).to(DTYPE).save_pretrained(folder / "target")
    # The published keys in place of what transformers 5 writes: it moves some, where SGLang 0.5.23 does not look for
    # them (a Qwen3-Next's RoPE base).
    (folder / "target" / "config.json").write_text(json.dumps(target, indent=2))
    _write_tokenizer(folder / "target", multimodal="vision_config" in target)
    _write_drafter(shrink_drafter(published_drafter, text_config(published_target)), folder / "drafter")
    return model.eval()


def _round(model: torch.nn.Module) -> None:
    """Weights to what ``DTYPE`` can hold, the model stays in float32: its RoPE frequencies are no weights."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(DTYPE))


def shrink_target(published: dict[str, Any]) -> dict[str, Any]:
    config = copy.deepcopy(published)
    text = config.get("text_config", config)
    shift = VOCAB - text["vocab_size"]
    kv_heads = 2  # two, so that tensor parallelism could divide them
    key_heads = 2
    text.update(
        num_attention_heads=kv_heads * text["num_attention_heads"] // text["num_key_value_heads"],
        num_key_value_heads=kv_heads,
        linear_num_value_heads=key_heads * text["linear_num_value_heads"] // text["linear_num_key_heads"],
        linear_num_key_heads=key_heads,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        head_dim=HEAD,
        hidden_size=HIDDEN,
        num_hidden_layers=TARGET_LAYERS,
        layer_types=text["layer_types"][:TARGET_LAYERS],
        max_position_embeddings=CONTEXT,
        vocab_size=VOCAB,
    )
    for key, size in {"intermediate_size": 128, "moe_intermediate_size": 32, "num_experts": 16}.items():
        if key in text:
            text[key] = size
    if "shared_expert_intermediate_size" in text:
        text["shared_expert_intermediate_size"] = 32
    for key in ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"):
        if key in config:
            config[key] += shift
    text.update(eos_token_id=EOS, bos_token_id=None)
    if "rope_parameters" in text:
        text["rope_parameters"]["mrope_section"] = [2, 1, 1]  # half of the turned quarter of a head
    if "vision_config" in config:
        config["vision_config"].update(
            depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=HIDDEN
        )
        config["vision_config"]["num_position_embeddings"] = 64
    return config


def shrink_drafter(published: dict[str, Any], target: Any) -> dict[str, Any]:
    config = copy.deepcopy(published)
    kv_heads = 2
    config.update(
        num_attention_heads=kv_heads * config["num_attention_heads"] // config["num_key_value_heads"],
        num_key_value_heads=kv_heads,
        head_dim=HEAD,
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=DRAFTER_LAYERS,
        num_target_layers=TARGET_LAYERS,
        # The last layers: a drafter that mixes both kinds ends with its full one.
        layer_types=config["layer_types"][-DRAFTER_LAYERS:],
        max_position_embeddings=CONTEXT,
        vocab_size=VOCAB,
    )
    if config.get("sliding_window"):
        config["sliding_window"] = WINDOW
    if config.get("rope_scaling"):
        config["rope_scaling"]["original_max_position_embeddings"] = CONTEXT // 64
    dflash = config["dflash_config"]
    dflash["mask_token_id"] += VOCAB - target["vocab_size"]
    count = len(dflash["target_layer_ids"])
    dflash["target_layer_ids"] = [1 + round(i * (TARGET_LAYERS - 4) / (count - 1)) for i in range(count)]
    return config


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


def request() -> dict[str, Any]:
    """Eight requests that arrive together."""
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    return {"input_ids": prompts(), "sampling_params": sampling}


def generate(server: Server) -> list[dict[str, Any]]:
    response = server.post("/generate", request())
    assert response.status_code == 200, response.text
    answers: list[dict[str, Any]] = response.json()
    assert [len(answer["output_ids"]) for answer in answers] == [NEW_TOKENS] * 8
    return answers


def assert_served_here(answers: list[dict[str, Any]], server: Server) -> None:
    """It was this package's worker that drafted and verified, in the checkpoint's own dtype."""
    assert "serves DFLASH" in server.log
    assert worker_info(server)["version"], "another worker served"
    assert "KV Cache is allocated. dtype: torch.bfloat16" in server.log
    assert all(answer["meta_info"]["spec_verify_ct"] > 0 for answer in answers)
