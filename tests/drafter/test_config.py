"""A drafter's ``config.json`` is read as published. ``tests/plan/test_broken_pairs.py`` has what is refused, by key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.drafter.config import DrafterConfig
from sglang_dflash.drafter.formats import kind_left_to_builtin
from tests.support.configs import MISSING, drafter

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 1024}
SLIDING, FULL = "sliding_attention", "full_attention"


def parse(**changes: Any) -> DrafterConfig:
    return DrafterConfig.from_dict(drafter(**changes))


def test_a_plain_drafter_is_read_from_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(drafter()))
    config = DrafterConfig.load(tmp_path)
    assert (config.block_size, config.mask_token_id, config.target_layer_ids) == (16, 900, (1, 4, 6))
    assert (config.num_target_layers, config.num_layers, config.head_dim, config.num_kv_heads) == (8, 2, 16, 2)
    assert (config.layer_types, config.causal) == ((FULL, FULL), (False, False))
    assert (config.sliding_window, config.rope_scaling, config.rotary_dim) == (None, None, 16)
    assert (config.input_scale, config.output_scale) == (1.0, 1.0)
    assert kind_left_to_builtin(drafter(dflash_config={"conv_kernel_size": 0, "sample_from_anchor": True})) is None


@pytest.mark.parametrize("key", ["mask_token_id", "target_layer_ids", "block_size", "num_target_layers"])
def test_dflash_keys_may_stand_at_either_level_and_dflash_config_takes_precedence(key: str) -> None:
    config = drafter()
    value = config["dflash_config"].pop(key, None) or config.pop(key)
    for places in ({"nested"}, {"top"}, {"nested", "top"}):
        written = drafter()
        written["dflash_config"].pop(key, None)
        written.pop(key, None)
        if "nested" in places:
            written["dflash_config"][key] = value
        if "top" in places:
            written[key] = 7 if "nested" in places else value
        assert DrafterConfig.from_dict(written) == parse()


@pytest.mark.parametrize(
    ("key", "input_scale", "output_scale"),
    [("input_embedding_scale", 0.5, 1.0), ("output_multiplier", 1.0, 0.5), ("logit_scale", 1.0, 0.5)],
)
def test_a_scale_is_read(key: str, input_scale: float, output_scale: float) -> None:
    config = parse(**{key: 0.5})
    assert (config.input_scale, config.output_scale) == (input_scale, output_scale)


DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 4}


def dflash2(architecture: str = "DFlash2DraftModel", **nested: Any) -> DrafterConfig:
    required = {"mask_token_id": 900, "target_layer_ids": [1, 4, 6]}
    return parse(architectures=[architecture], dflash_config={**required, **DFLASH2, **nested})


def test_dflash2_is_read_under_every_name() -> None:
    config = dflash2()
    assert (config.conv_taps, config.conv_group, config.selector_rank, config.selector_top_k) == (2, 16, 8, 4)
    assert (config.output_scale, config.logit_cap) == (1.0, None)
    for architecture in ("DFlash2BeamDraftModel", "MiniMaxDFlash2DraftModel", "DFlashDraftModel"):
        assert dflash2(architecture) == config
    plain = parse(dflash_config={"mask_token_id": 900, "target_layer_ids": [1, 4, 6], **dict.fromkeys(DFLASH2, 0)})
    assert plain == parse() and plain.selector_rank == plain.conv_taps == 0


def test_logits_are_scaled_and_capped_with_and_without_a_selector() -> None:
    plain = drafter(final_logit_softcapping=30.0)  # Gemma-4's
    assert (DrafterConfig.from_dict(plain).logit_cap, kind_left_to_builtin(plain)) == (30.0, None)
    capped = dflash2(output_multiplier=0.196, final_logit_softcapping=20.0)
    assert (capped.output_scale, capped.logit_cap) == (0.196, 20.0)
    assert dflash2(final_logit_softcapping=0) == dflash2(final_logit_softcapping=None) == dflash2()


def test_the_convolution_and_the_selector_may_be_alone() -> None:
    selector, convolution = (
        dflash2(conv_kernel_size=0, conv_group_size=None),
        dflash2("DFlashDraftModel", **NO_SELECTOR),
    )
    assert (selector.conv_taps, selector.selector_rank) == (0, 8)
    assert (convolution.conv_taps, convolution.selector_rank) == (2, 0)


NO_SELECTOR = {"selector_rank": 0, "selector_top_k": 0}


@pytest.mark.parametrize(
    ("is_causal", "causal"), [(None, (True, False)), (True, (True, True)), (False, (False, False))]
)
def test_is_causal_overrides_the_layer_types_and_the_window_of_sliding_layers_is_kept(
    is_causal: bool | None, causal: tuple[bool, bool]
) -> None:
    # Transformers' Qwen3Config would drop the window here, as use_sliding_window is false.
    mixed = {"layer_types": [SLIDING, FULL], "sliding_window": 2048, "use_sliding_window": False}
    for key in ("is_causal", "causal"):
        config = parse(**mixed, **{key: is_causal})
        assert (config.causal, config.sliding_window) == (causal, 2048)
    assert parse(sliding_window=4096).sliding_window is None, "no layer slides"


def test_plain_and_scaled_rope_are_read_in_both_spellings() -> None:
    assert parse(rope_theta=MISSING, rope_parameters={"rope_theta": 10000.0, "rope_type": "default"}) == parse()
    assert (parse(rope_parameters=YARN).rope_theta, parse(rope_parameters=YARN).rope_scaling) == (1e6, YARN)
    older = parse(rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024})
    assert older.rope_theta == 10000.0
    assert older.rope_scaling is not None and older.rope_scaling["rope_type"] == "yarn"
    assert parse(partial_rotary_factor=0.25).rotary_dim == 4
    copied = {"rope_theta": 1e4, "rope_dim": 16, "partial_rotary_factor": 0.25}
    assert parse(rope_parameters=copied).rotary_dim == 16
