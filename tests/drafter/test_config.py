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


def parse(**changes: Any) -> DrafterConfig:
    return DrafterConfig.from_dict(drafter(**changes))


def test_reads_a_plain_drafter() -> None:
    config = parse()
    assert (config.block_size, config.mask_token_id, config.target_layer_ids) == (16, 900, (1, 4, 6))
    assert (config.num_target_layers, config.num_layers, config.head_dim, config.num_kv_heads) == (
        8,
        2,
        16,
        2,
    )
    assert config.layer_types == ("full_attention", "full_attention")
    assert config.causal == (False, False)
    assert (config.sliding_window, config.rope_scaling, config.rotary_dim) == (None, None, 16)


def test_dflash_config_takes_precedence_over_the_top_level() -> None:
    config = drafter(mask_token_id=7)
    config["mask_token_id"] = 8
    assert DrafterConfig.from_dict(config).mask_token_id == 7


@pytest.mark.parametrize("key", ["mask_token_id", "target_layer_ids", "block_size", "num_target_layers"])
def test_dflash_keys_may_stand_at_either_level(key: str) -> None:
    config = drafter()
    value = config["dflash_config"].pop(key, None) or config.pop(key)
    nested, top = drafter(), drafter()
    for place in (nested, nested["dflash_config"], top, top["dflash_config"]):
        place.pop(key, None)
    nested["dflash_config"][key] = value
    top[key] = value
    assert DrafterConfig.from_dict(nested) == DrafterConfig.from_dict(top) == parse()


def test_a_text_config_is_read() -> None:
    config = drafter()
    own = {key: config.pop(key) for key in ("architectures", "dflash_config", "block_size", "num_target_layers")}
    assert DrafterConfig.from_dict({**own, "text_config": config}) == parse()


@pytest.mark.parametrize(
    ("key", "input_scale", "output_scale"),
    [("input_embedding_scale", 0.5, 1.0), ("output_multiplier", 1.0, 0.5), ("logit_scale", 1.0, 0.5)],
)
def test_a_scale_is_read_and_must_be_positive(key: str, input_scale: float, output_scale: float) -> None:
    assert (parse().input_scale, parse().output_scale) == (1.0, 1.0)
    config = parse(**{key: 0.5})
    assert (config.input_scale, config.output_scale) == (input_scale, output_scale)
    for unusable in (0.0, -1.0, float("nan"), "0.5"):
        with pytest.raises(DFlashError, match=f"{key} is"):
            parse(**{key: unusable})


class TestLayers:
    MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 2048}

    @pytest.mark.parametrize(
        ("is_causal", "causal"), [(None, (True, False)), (True, (True, True)), (False, (False, False))]
    )
    def test_is_causal_overrides_the_layer_types(self, is_causal: bool | None, causal: tuple[bool, bool]) -> None:
        assert parse(**self.MIXED, is_causal=is_causal).causal == causal
        assert parse(**self.MIXED, causal=is_causal).causal == causal

    def test_the_window_of_sliding_layers_is_kept_as_published(self) -> None:
        # Transformers' Qwen3Config would drop it here, as use_sliding_window is false.
        assert parse(**self.MIXED, use_sliding_window=False).sliding_window == 2048

    def test_a_window_without_sliding_layers_is_ignored(self) -> None:
        assert parse(sliding_window=4096).sliding_window is None


class TestRope:
    def test_both_spellings_of_plain_rope_agree(self) -> None:
        modern = parse(rope_theta=MISSING, rope_parameters={"rope_theta": 10000.0, "rope_type": "default"})
        assert modern == parse()

    def test_yarn_keeps_its_parameters(self) -> None:
        config = parse(rope_parameters=YARN)
        assert config.rope_theta == 1e6
        assert config.rope_scaling == YARN

    def test_yarn_in_the_older_spelling(self) -> None:
        scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
        config = parse(rope_scaling=scaling)
        assert config.rope_theta == 10000.0
        assert config.rope_scaling is not None and config.rope_scaling["rope_type"] == "yarn"

    def test_partial_rotation(self) -> None:
        assert parse(partial_rotary_factor=0.25).rotary_dim == 4
        parameters = {"rope_theta": 1e4, "rope_dim": 16, "partial_rotary_factor": 0.25}
        assert parse(rope_parameters=parameters).rotary_dim == 16


BROKEN = [
    ("mask_token_id", MISSING),
    ("mask_token_id", "<|MASK|>"),
    ("mask_token_id", True),
    ("mask_token_id", -1),
    ("target_layer_ids", MISSING),
    ("target_layer_ids", []),
    ("target_layer_ids", "1,4,6"),
    ("target_layer_ids", [1, "4"]),
    ("target_layer_ids", [1, 4, -1]),
    ("target_layer_ids", [1, 4, 4]),
    ("block_size", 1),
    ("block_size", "16"),
    ("num_target_layers", 0),
    ("num_hidden_layers", MISSING),
    ("layer_types", ["full_attention"]),
    ("layer_types", ["full_attention", "linear_attention"]),
    ("layer_types", "full_attention"),
    ("is_causal", "no"),
    ("num_key_value_heads", 3),
    ("head_dim", MISSING),
    ("vocab_size", MISSING),
    ("hidden_size", 0),
    ("rms_norm_eps", MISSING),
    ("rope_theta", MISSING),
    ("rope_parameters", "default"),
    ("rope_parameters", {"rope_theta": 1e4, "rope_dim": 15}),
    ("rope_parameters", {"rope_theta": 1e4, "rope_type": "yarn"}),
]


@pytest.mark.parametrize(("key", "value"), BROKEN)
def test_an_unusable_key_is_named_with_its_value_and_a_remedy(key: str, value: Any) -> None:
    with pytest.raises(DFlashError) as caught:
        parse(**{key: value})
    named = {"num_key_value_heads": "num_attention_heads", "rope_parameters": "rope_"}.get(key, key)
    assert named in caught.value.value
    assert caught.value.expected and caught.value.remedy


def test_sliding_layers_need_a_window() -> None:
    with pytest.raises(DFlashError, match="sliding_window is missing"):
        parse(layer_types=["sliding_attention"] * 2)


def test_use_swa_without_sliding_layers_is_refused() -> None:
    with pytest.raises(DFlashError, match="use_swa"):
        parse(layer_types=["full_attention"] * 2, use_swa=True)


def test_use_sliding_window_without_layer_types_is_refused() -> None:
    with pytest.raises(DFlashError, match="layer_types is missing"):
        parse(use_sliding_window=True)


OTHER_KINDS = [
    ({"architectures": ["DFlash2DraftModel"]}, "DFlash2"),
    ({"architectures": ["LiLiCorrDraftModel"]}, "LiLiCorr"),
    ({"architectures": ["Qwen3ForCausalLM"]}, "unknown"),
    ({"architectures": []}, "unknown"),
    ({"dflash_config": {"selector_rank": 256}}, "DFlash2"),
    ({"dflash_config": {"conv_kernel_size": 2}}, "DFlash2"),
    ({"dflash_config": {"projector_type": "domino"}}, "Domino"),
    ({"dflash_config": {"lilicorr_hidden_size": 64}}, "LiLiCorr"),
    ({"has_embed_tokens": True}, "Nemotron"),
    ({"dflash_config": {"sample_from_anchor": False}}, "Nemotron"),
    ({"dflash_config": {"attention_sink_bias": True}}, "MiMo"),
    ({"use_gemma_norm": True}, "Gemma"),
    ({"dflash_config": {"final_logit_softcapping": 30.0}}, "softcapped logits"),
    ({"hidden_act": "swigluoai"}, "swigluoai"),
]


@pytest.mark.parametrize(("changes", "kind"), OTHER_KINDS)
def test_drafters_of_other_kinds_are_named(changes: dict[str, Any], kind: str) -> None:
    config = drafter(**changes)
    assert kind in str(kind_left_to_builtin(config))
    with pytest.raises(DFlashError, match=kind):
        DrafterConfig.from_dict(config)


def test_a_plain_drafter_is_accepted() -> None:
    assert kind_left_to_builtin(drafter(dflash_config={"conv_kernel_size": 0, "sample_from_anchor": True})) is None


@pytest.mark.parametrize(("text", "found"), [(None, "no config.json found"), ("{", "not JSON"), ("[]", "holds a list")])
def test_an_unreadable_file_is_reported(tmp_path: Path, text: str | None, found: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(DFlashError, match=found):
        load_config(tmp_path)


def test_load_reads_a_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(drafter()))
    assert DrafterConfig.load(tmp_path) == parse()
