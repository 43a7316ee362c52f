"""Configurations that fit together, for tests to break one key at a time."""

from __future__ import annotations

import copy
from typing import Any

from sglang_dflash.drafter.checkpoint import ModelFiles
from sglang_dflash.drafter.config import DrafterConfig
from sglang_dflash.plan.pair import Pair

DRAFTER: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": 16,
    "dflash_config": {"mask_token_id": 900, "target_layer_ids": [1, 4, 6]},
    "num_target_layers": 8,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}

TARGET: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 8,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "eos_token_id": 2,
}

MISSING = object()


def drafter(**changes: Any) -> dict[str, Any]:
    return _changed(DRAFTER, changes)


def target(**changes: Any) -> dict[str, Any]:
    return _changed(TARGET, changes)


def pair_of(drafter: dict[str, Any], target: dict[str, Any] = TARGET, **fields: Any) -> Pair:
    """A pair of these configurations, without files."""
    pair = Pair(ModelFiles("target"), ModelFiles("drafter"), **fields)
    vars(pair.drafter_files).update(config=drafter, published=drafter, tensors={})
    vars(pair).update(target=target, drafter=DrafterConfig.from_dict(drafter))
    return pair


def _changed(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    config = copy.deepcopy(base)
    for key, value in changes.items():
        nested = config.get("dflash_config", {})
        place = nested if key in nested else config
        if value is MISSING:
            del place[key]
        else:
            place[key] = value
    return config
