"""A drafter's ``config.json`` is read as published. What is refused: ``tests/launch/test_broken_pairs.py``."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_dflash.drafter.config import DrafterConfig
from sglang_dflash.drafter.formats import kind_left_to_builtin
from tests.support.configs import DRAFTER, MISSING, drafter

SLIDING, FULL = "sliding_attention", "full_attention"
PLAIN: dict[str, Any] = {
    **{"block_size": 16, "mask_token_id": 900, "target_layer_ids": (1, 4, 6), "num_target_layers": 8, "num_layers": 2},
    **{"head_dim": 16, "num_kv_heads": 2, "layer_types": (FULL, FULL), "causal": (False, False), "logit_cap": None},
    **{"sliding_window": None, "rope_theta": 1e4, "rope_scaling": None, "rotary_dim": 16, "input_scale": 1.0},
    **{"output_scale": 1.0, "conv_taps": 0, "conv_group": 0, "selector_rank": 0, "selector_top_k": 0},
}
# Transformers' Qwen3Config would drop the window here.
MIXED: dict[str, Any] = {"layer_types": [SLIDING, FULL], "sliding_window": 2048, "use_sliding_window": False}
AS_MIXED = {"layer_types": (SLIDING, FULL), "sliding_window": 2048}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 1024}
OLD_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
IDS: dict[str, Any] = {"mask_token_id": 900, "target_layer_ids": [1, 4, 6]}
CONVOLUTION: dict[str, Any] = {"conv_kernel_size": 2, "conv_group_size": 16}
AS_CONVOLUTION = {"conv_taps": 2, "conv_group": 16}
SELECTOR: dict[str, Any] = {"selector_rank": 8, "selector_top_k": 4}
NO_DFLASH2: dict[str, Any] = dict.fromkeys([*CONVOLUTION, *SELECTOR], 0)
CAPPED: dict[str, Any] = {"output_multiplier": 0.196, "final_logit_softcapping": 20.0}
DFLASH2_NAMES = "DFlash2DraftModel", "DFlash2BeamDraftModel", "MiniMaxDFlash2DraftModel", "DFlashDraftModel"


def dflash2(parts: dict[str, Any], name: str = "DFlash2DraftModel") -> dict[str, Any]:
    return {"architectures": [name], "dflash_config": IDS | parts}


@pytest.mark.parametrize(
    ("changes", "read"),
    [
        ({}, {}),
        ({"input_embedding_scale": 0.5}, {"input_scale": 0.5}),
        ({"output_multiplier": 0.5}, {"output_scale": 0.5}),
        ({"logit_scale": 0.5}, {"output_scale": 0.5}),
        ({"final_logit_softcapping": 30.0}, {"logit_cap": 30.0}),  # Gemma-4's
        ({"sliding_window": 4096}, {}),  # no layer slides
        (MIXED, AS_MIXED | {"causal": (True, False)}),
        *((MIXED | {key: None}, AS_MIXED | {"causal": (True, False)}) for key in ("is_causal", "causal")),
        *((MIXED | {key: True}, AS_MIXED | {"causal": (True, True)}) for key in ("is_causal", "causal")),
        *((MIXED | {key: False}, AS_MIXED) for key in ("is_causal", "causal")),
        ({"rope_theta": MISSING, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}, {}),
        ({"rope_parameters": YARN}, {"rope_theta": 1e6, "rope_scaling": YARN}),
        ({"rope_scaling": OLD_YARN}, {"rope_scaling": {**OLD_YARN, "rope_type": "yarn"}}),
        ({"partial_rotary_factor": 0.25}, {"rotary_dim": 4}),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_dim": 16, "partial_rotary_factor": 0.25}}, {}),
        *((dflash2(CONVOLUTION | SELECTOR, name), AS_CONVOLUTION | SELECTOR) for name in DFLASH2_NAMES),
        (dflash2(CONVOLUTION, "DFlashDraftModel"), AS_CONVOLUTION),
        (dflash2(SELECTOR | {"conv_kernel_size": 0, "conv_group_size": None}), SELECTOR),
        (dflash2(SELECTOR | CAPPED), SELECTOR | {"output_scale": 0.196, "logit_cap": 20.0}),
        *((dflash2(SELECTOR | {"final_logit_softcapping": off}), SELECTOR) for off in (0, None)),
        (dflash2(NO_DFLASH2 | {"sample_from_anchor": True}, "DFlashDraftModel"), {}),
    ],
    ids=" ".join,
)
def test_a_configuration_is_read(changes: dict[str, Any], read: dict[str, Any]) -> None:
    config = DrafterConfig.from_dict(drafter(**changes))
    assert {name: getattr(config, name) for name in PLAIN} == PLAIN | read
    assert kind_left_to_builtin(drafter(**changes)) is None


@pytest.mark.parametrize("key", ["mask_token_id", "target_layer_ids", "block_size", "num_target_layers"])
def test_dflash_keys_may_stand_at_either_level_and_dflash_config_takes_precedence(key: str) -> None:
    value = {**DRAFTER, **DRAFTER["dflash_config"]}[key]
    for nested, top in (({key: value}, {}), ({}, {key: value}), ({key: value}, {key: 7})):
        written = drafter(**{key: MISSING}) | top
        written["dflash_config"] |= nested
        assert DrafterConfig.from_dict(written) == DrafterConfig.from_dict(drafter())
