"""Parameters of a target, from its configuration: what its weights take if no safetensors header can be read.

Covers the families of the published targets: Qwen3 (dense and MoE), Qwen3-Next and Qwen3.5, the vision tower included.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_dflash.drafter.config import text_config
from sglang_dflash.memory.sizes import count, full_layers, head_size, kv_heads

FAMILIES = {
    "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text",
}  # fmt: skip


def is_known(config: Mapping[str, Any]) -> bool:
    """Whether the sizes computed here hold for the target."""
    return str(text_config(config).get("model_type")) in FAMILIES


def target_parameters(config: Mapping[str, Any]) -> int:
    """Parameters of the target, without the layers for multi-token prediction that its checkpoint may carry."""
    text = text_config(config)
    hidden, layers = count(text, "hidden_size"), count(text, "num_hidden_layers")
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
    embeddings = count(text, "vocab_size") * hidden * (1 if tied else 2)
    full = min(layers, full_layers(text))
    norms = layers * 2 * hidden + hidden
    mixers = full * _attention(text) + (layers - full) * _linear_attention(text)
    return embeddings + norms + mixers + layers * _feed_forward(text) + _vision(config.get("vision_config"))


def _attention(text: Mapping[str, Any]) -> int:
    hidden, heads = count(text, "hidden_size"), count(text, "num_attention_heads")
    head, kv = head_size(text), kv_heads(text)
    gated = text.get("attn_output_gate", "linear_num_value_heads" in text)  # hybrids gate their attention's output
    queries = heads * head * (2 if gated else 1)
    return hidden * (queries + 2 * kv * head) + heads * head * hidden + 2 * head


def _linear_attention(text: Mapping[str, Any]) -> int:
    if "linear_num_value_heads" not in text:
        return 0
    hidden, heads = count(text, "hidden_size"), count(text, "linear_num_value_heads")
    keys = count(text, "linear_num_key_heads") * count(text, "linear_key_head_dim")
    values = heads * count(text, "linear_value_head_dim")
    mixed = 2 * keys + values
    projections = hidden * (mixed + values + 2 * heads) + values * hidden
    return (
        projections + mixed * count(text, "linear_conv_kernel_dim") + 2 * heads + count(text, "linear_value_head_dim")
    )


def _feed_forward(text: Mapping[str, Any]) -> int:
    hidden = count(text, "hidden_size")
    experts = count(text, "num_experts", 0)
    if not experts:
        return 3 * hidden * count(text, "intermediate_size")
    shared = count(text, "shared_expert_intermediate_size", 0)
    gate = hidden if shared else 0
    return hidden * experts + 3 * hidden * (experts * count(text, "moe_intermediate_size") + shared) + gate


def _vision(vision: object) -> int:
    if not isinstance(vision, Mapping) or not vision:
        return 0
    hidden, inner = count(vision, "hidden_size"), count(vision, "intermediate_size")
    patch = count(vision, "in_channels") * count(vision, "temporal_patch_size") * count(vision, "patch_size") ** 2
    block = 4 * hidden * hidden + 4 * hidden + 2 * hidden * inner + inner + hidden + 4 * hidden
    merged = hidden * count(vision, "spatial_merge_size") ** 2
    merger = 2 * hidden + merged * merged + merged + merged * count(vision, "out_hidden_size")
    positions = count(vision, "num_position_embeddings", 0) * hidden
    depth, out = count(vision, "depth"), count(vision, "out_hidden_size")
    return patch * hidden + hidden + positions + depth * block + merger + out
