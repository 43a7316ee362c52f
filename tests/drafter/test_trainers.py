"""Drafters of other trainers, with the keys and tensor names that their own code writes (tests/fixtures/trainers).

Each that is served loads the same tensors into the same places as the same drafter in the plain form.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from sglang_dflash.drafter.config import DrafterConfig
from sglang_dflash.drafter.formats import kind_left_to_builtin, plain_form
from sglang_dflash.drafter.tensors import LoadReport
from sglang_dflash.errors import DFlashError
from tests.support.configs import drafter, write_model
from tests.support.files import load_drafter
from tests.support.trainers import SERVED, config, plain_config, tensors_of, write_target

VOCABULARY = {"embed_tokens.weight", "lm_head.weight", "t2d", "d2t"}
SPECULATORS = config("speculators")
Placed = dict[tuple[str, str | int | None], Tensor]


def loaded(folder: Path) -> Placed:
    """Tensors that the drafter model loads, by parameter and shard."""
    report = LoadReport(load_drafter(folder))
    placed = list(report.place(load_file(folder / "model.safetensors").items()))
    report.check(complete=True)
    return {(name, shard): tensor for name, shard, tensor in placed}


@pytest.mark.parametrize("name", SERVED)
def test_is_read_as_the_same_drafter_in_the_plain_form(name: str) -> None:
    plain = DrafterConfig.from_dict(plain_config(name))
    found = DrafterConfig.from_dict(config(name))
    assert found.model_copy(update={"draft_vocab_size": None, "copies_vocabulary": False}) == plain
    assert found.draft_vocab_size == (512 if name == "speculators-reduced" else None)
    assert found.copies_vocabulary == name.startswith("speculators")
    once = plain_form(config(name))
    assert plain_form(once) == once


@pytest.mark.parametrize("name", ["specforge", "modelopt", "zlab-later"])
def test_a_plain_configuration_is_unchanged(name: str) -> None:
    assert plain_form(config(name)) == config(name)


@pytest.mark.parametrize("name", SERVED)
def test_loads_the_tensors_of_the_same_drafter_in_the_plain_form(name: str, tmp_path: Path) -> None:
    tensors = tensors_of(name, write_target(tmp_path / "target"))
    found = loaded(write_model(tmp_path / "trainer", config(name), tensors))
    body = {key: tensor for key, tensor in tensors.items() if key not in VOCABULARY}
    expected = loaded(write_model(tmp_path / "plain", plain_config(name), body))
    if "t2d" in tensors:
        expected["t2d", None] = tensors["t2d"]
    assert found.keys() == expected.keys()
    assert [place for place, tensor in expected.items() if not torch.equal(found[place], tensor)] == []


def test_a_reduced_vocabulary_without_its_tokens_or_of_another_shape_is_refused(tmp_path: Path) -> None:
    tensors = tensors_of("speculators-reduced", write_target(tmp_path / "target"))
    del tensors["t2d"]
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:100].clone()
    with pytest.raises(DFlashError, match=r"missing: t2d.*lm_head.weight is \[100, 64\], not \[512, 64\]"):
        loaded(write_model(tmp_path / "trainer", config("speculators-reduced"), tensors))


def test_a_dflash2_drafter_of_speculators_is_not_causal_unless_its_file_states_it() -> None:
    written = config("speculators-dflash2")
    del written["sliding_window_non_causal"]
    assert DrafterConfig.from_dict(written) == DrafterConfig.from_dict(config("speculators-dflash2"))
    written["transformer_layer_config"] |= {"layer_types": ["sliding_attention"] * 2, "sliding_window": 64}
    assert DrafterConfig.from_dict(written).causal == (False, False)
    assert DrafterConfig.from_dict({**written, "sliding_window_non_causal": False}).causal == (True, True)


REFUSED: list[tuple[dict[str, Any], str]] = [
    # Its block has no token for the anchor, which alone would make it another kind.
    (drafter(architectures=["Qwen3XPressModel"], sample_from_anchor=False), "XPress.*, which SGLang does not"),
    (drafter(dflash_config={"thresh_head_direct_len": True}), "AdaFlash.*, which SGLang does not serve"),
    (config("specforge-dspark"), "DSpark .Markov head., as SpecForge writes it"),
    (config("specforge-domino"), "drafter type: DFlash with the head domino"),
    ({**config("modelopt"), "projector_type": "dspark"}, "drafter type: DFlash with the head dspark"),
    ({**SPECULATORS, "speculators_model_type": "eagle3"}, "speculators_model_type is 'eagle3'"),
    ({**SPECULATORS, "speculators_model_type": "xpress"}, "speculators_model_type is 'xpress'"),
    ({**SPECULATORS, "speculators_model_type": "dflash2", "draft_ffn_type": "moe"}, "draft_ffn_type is 'moe'"),
    ({**SPECULATORS, "speculators_model_type": "dflash2"}, "selector_rank is missing"),
    ({**SPECULATORS, "sample_from_anchor": True}, "sample_from_anchor is true"),
    ({**SPECULATORS, "aux_hidden_state_layer_ids": [0, 4, 6]}, r"aux_hidden_state_layer_ids is \[0, 4, 6\]"),
    ({**SPECULATORS, "aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids is missing"),
    ({**SPECULATORS, "aux_hidden_state_layer_ids": [2, "4"]}, "aux_hidden_state_layer_ids is"),
    ({**SPECULATORS, "transformer_layer_config": None}, "transformer_layer_config is missing"),
    ({**SPECULATORS, "target_hidden_size": 128}, "target_hidden_size 128 differs from hidden_size 64"),
    ({**SPECULATORS, "mask_token_id": None}, "mask_token_id is missing"),
    ({**SPECULATORS, "block_size": "8"}, "block_size is '8'"),
    ({**SPECULATORS, "draft_vocab_size": 2048}, "draft_vocab_size is 2048"),
    # AutoModel's JetSpec writes this; its class was renamed for a server.
    (
        {**config("automodel-jetspec"), "architectures": ["DFlashDraftModel"]},
        "is_causal is False.*dflash_config.causal, which is True",
    ),
]


@pytest.mark.parametrize(("written", "named"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_cannot_be_served_is_named(written: dict[str, Any], named: str) -> None:
    with pytest.raises(DFlashError, match=named):
        DrafterConfig.from_dict(written)


@pytest.mark.parametrize("name", ["specforge-domino", "automodel-domino"])
def test_a_kind_that_sglang_serves_is_left_to_it_in_the_plain_form(name: str) -> None:
    plain = plain_form(config(name))
    assert kind_left_to_builtin(plain) == "DFlash with the head domino"
    assert plain["architectures"] == ["DFlashDraftModel"]


def test_a_targets_multimodal_rope_in_a_speculators_drafter_is_not_applied() -> None:
    """Its trainer rotates the whole head, by the sliding layers' parameters."""
    written = config("speculators")
    rope = written["transformer_layer_config"]["rope_parameters"]
    copied = {"mrope_section": [3, 3, 2], "mrope_interleaved": True, "partial_rotary_factor": 0.25}
    for parameters in ({**rope, **copied}, {"sliding_attention": rope, "full_attention": {"rope_theta": 7.0}}):
        written["transformer_layer_config"]["rope_parameters"] = parameters
        assert DrafterConfig.from_dict(written) == DrafterConfig.from_dict(config("speculators"))
