"""Tiny random vision-language targets with a drafter each, in fp32: what the published Qwen3.5 targets are, shrunk.

The processor is made here too, so that a server needs nothing from the hub: the tiny pairs' tokenizer with Qwen's
vision tokens, Qwen's image processor, and a chat template that puts an image where the message has it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from sglang_dflash_lab.pairs import drafter_path, target_path
from sglang_dflash_lab.train.drafter import Drafter, DrafterConfig
from tests.support.checkpoints import EXPERTS, GDN, MROPE, spread_weights

NAMES = ("qwen3_5", "qwen3_5_moe", "qwen3_vl")
HYBRIDS = ("qwen3_5", "qwen3_5_moe")
VOCAB, HIDDEN, LAYERS, HEAD, BLOCK = 1088, 128, 4, 32, 8
EOS, MASK = 2, 3  # of the tiny pairs' tokenizer, which has 1,024 tokens
VISION_TOKENS = {
    "vision_start": ("<|vision_start|>", 1024),
    "vision_end": ("<|vision_end|>", 1025),
    "image": ("<|image_pad|>", 1026),
    "video": ("<|video_pad|>", 1027),
}
IMAGE_TOKEN = VISION_TOKENS["image"][1]
PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"
PATCH, MERGE = 16, 2
TOKEN_PIXELS = PATCH * MERGE  # an image token is a square of so many pixels a side
CHAT_TEMPLATE = (
    "{%- for message in messages -%}{{ '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.content is string -%}{{ message.content }}{%- else -%}"
    "{%- for part in message.content -%}"
    "{%- if part.type == 'text' -%}{{ part.text }}{%- else -%}" + PLACEHOLDER + "{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{{ '<|im_end|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HEAD,
    "intermediate_size": 256,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "out_hidden_size": HIDDEN,
    "num_position_embeddings": 64,
}
_NO_DEEPSTACK: dict[str, Any] = {"deepstack_visual_indexes": []}  # as published; SGLang takes three for granted
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
# Name -> transformers' stem, the text model's own keys, the vision tower's.
_SHAPES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5", {**GDN, **MROPE}, _NO_DEEPSTACK),
    "qwen3_5_moe": ("Qwen3_5Moe", {**GDN, **MROPE, **EXPERTS}, _NO_DEEPSTACK),
    "qwen3_vl": ("Qwen3VL", {"rope_parameters": _ROPE}, {"deepstack_visual_indexes": [0, 1]}),
}


def write_target(name: str, folder: Path) -> transformers.PreTrainedModel:
    """A Qwen3.5, dense or of experts, or a Qwen3-VL whose tower feeds two layers of the text model too (deepstack)."""
    stem, text, vision = _SHAPES[name]
    torch.manual_seed(0)
    ids = {f"{token}_token_id": number for token, (_, number) in VISION_TOKENS.items()}
    config = getattr(transformers, f"{stem}Config")(
        text_config={**_TEXT, **text}, vision_config={**_VISION, **vision}, tie_word_embeddings=False, **ids
    )
    model = getattr(transformers, f"{stem}ForConditionalGeneration")(config).float().eval()
    spread_weights(model)
    model.save_pretrained(folder)
    processor().save_pretrained(folder)
    return model


def processor() -> transformers.ProcessorMixin:
    """Takes images down to one token; a side is rounded to whole tokens."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(target_path("tiny-hybrid"))
    tokenizer.add_special_tokens({"additional_special_tokens": [text for text, _ in VISION_TOKENS.values()]})
    area = {"shortest_edge": TOKEN_PIXELS**2, "longest_edge": 256 * TOKEN_PIXELS**2}
    image = transformers.Qwen2VLImageProcessor(patch_size=PATCH, merge_size=MERGE, size=area)
    video = transformers.Qwen3VLVideoProcessor(patch_size=PATCH, merge_size=MERGE)
    return transformers.Qwen3VLProcessor(image, tokenizer, video, chat_template=CHAT_TEMPLATE)


def write_drafter(folder: Path) -> Drafter:
    """Random weights in which attention weighs much, so that what is injected, and where, changes the drafts."""
    torch.manual_seed(0)
    drafter = Drafter(
        replace(
            DrafterConfig.load(drafter_path("tiny-dense")),
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=256,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=HEAD,
            block_size=BLOCK,
            mask_token_id=MASK,
            target_layer_ids=(0, 2),
            num_target_layers=LAYERS,
            max_position_embeddings=4096,
            eos_token_id=EOS,
        )
    )
    with torch.no_grad():
        for name, weight in drafter.named_parameters():
            if name.endswith("o_proj.weight"):
                weight.mul_(20)
            elif name.endswith("q_norm.weight"):
                weight.mul_(4)
    drafter.save(folder)
    return Drafter.load(folder)  # rounded as on disk
