"""A drafter's ``config.json`` is read as published; a key without a usable value is an error that names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.drafter.config import DrafterConfig, load_config
from sglang_dflash.drafter.formats import kind_left_to_builtin
from sglang_dflash.errors import DFlashError
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


def test_a_text_config_is_read() -> None:
    config = drafter()
    own = {key: config.pop(key) for key in ("architectures", "dflash_config", "block_size", "num_target_layers")}
    assert DrafterConfig.from_dict({**own, "text_config": config}) == parse()


@pytest.mark.parametrize(
    ("key", "input_scale", "output_scale"),
    [("input_embedding_scale", 0.5, 1.0), ("output_multiplier", 1.0, 0.5), ("logit_scale", 1.0, 0.5)],
)
def test_a_scale_is_read(key: str, input_scale: float, output_scale: float) -> None:
    config = parse(**{key: 0.5})
    assert (config.input_scale, config.output_scale) == (input_scale, output_scale)


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


UNUSABLE: dict[str, list[Any]] = {
    "mask_token_id": [MISSING, "<|MASK|>", True, -1],
    "target_layer_ids": [MISSING, [], "1,4,6", [1, "4"], [1, 4, -1], [1, 4, 4]],
    "block_size": [1, "16"],
    "num_target_layers": [0],
    "num_hidden_layers": [MISSING],
    "layer_types": [[FULL], [FULL, "linear_attention"], FULL],
    "is_causal": ["no"],
    "num_key_value_heads": [3],
    "head_dim": [MISSING],
    "vocab_size": [MISSING],
    "hidden_size": [0],
    "rms_norm_eps": [MISSING],
    "rope_theta": [MISSING],
    "rope_parameters": [
        "default",
        {"rope_theta": 1e4, "rope_dim": 15},
        {"rope_theta": 1e4, "rope_type": "yarn"},
    ],
    **dict.fromkeys(("input_embedding_scale", "output_multiplier", "logit_scale"), [0.0, -1.0, float("nan"), "0.5"]),
}
NAMED = {"num_key_value_heads": "num_attention_heads", "rope_parameters": "rope_"}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in UNUSABLE.items() for value in values])
def test_an_unusable_key_is_named_with_its_value_and_a_remedy(key: str, value: Any) -> None:
    with pytest.raises(DFlashError) as caught:
        parse(**{key: value})
    assert NAMED.get(key, key) in caught.value.value
    assert caught.value.expected and caught.value.remedy


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layer_types": [SLIDING] * 2}, "sliding_window is missing"),
        ({"layer_types": [FULL] * 2, "use_swa": True}, "layer_types is"),
        ({"use_sliding_window": True}, "layer_types is missing"),
    ],
)
def test_windows_that_contradict_the_layer_types_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(DFlashError, match=named):
        parse(**changes)


OTHER_KINDS: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["DFlash2DraftModel"]}, "DFlash2"),
    ({"architectures": ["LiLiCorrDraftModel"]}, "LiLiCorr"),
    ({"architectures": ["Qwen3ForCausalLM"]}, "Qwen3ForCausalLM"),
    ({"architectures": []}, "unknown"),
    ({"dflash_config": {"selector_rank": 256}}, "selector_rank"),
    ({"dflash_config": {"conv_kernel_size": 2}}, "conv_kernel_size"),
    ({"dflash_config": {"projector_type": "domino"}}, "the head domino"),
    ({"dflash_config": {"lilicorr_hidden_size": 64}}, "lilicorr_hidden_size"),
    ({"has_embed_tokens": True}, "has_embed_tokens"),
    ({"dflash_config": {"sample_from_anchor": False}}, "sample_from_anchor"),
    ({"dflash_config": {"attention_sink_bias": True}}, "attention_sink_bias"),
    ({"use_gemma_norm": True}, "use_gemma_norm"),
    ({"dflash_config": {"final_logit_softcapping": 30.0}}, "final_logit_softcapping"),
    ({"hidden_act": "swigluoai"}, "swigluoai"),
]


@pytest.mark.parametrize(("changes", "kind"), OTHER_KINDS)
def test_drafters_of_other_kinds_are_named(changes: dict[str, Any], kind: str) -> None:
    config = drafter(**changes)
    assert kind in str(kind_left_to_builtin(config))
    with pytest.raises(DFlashError, match=kind):
        DrafterConfig.from_dict(config)


@pytest.mark.parametrize(("text", "found"), [(None, "no config.json found"), ("{", "not JSON"), ("[]", "holds a list")])
def test_an_unreadable_file_is_reported(tmp_path: Path, text: str | None, found: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(DFlashError, match=found):
        load_config(tmp_path)
