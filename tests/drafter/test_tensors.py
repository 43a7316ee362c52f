"""A drafter checkpoint has exactly the tensors and shapes of its configuration."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_dflash.drafter.config import DrafterConfig
from sglang_dflash.drafter.tensors import LoadReport, destination, expected_shapes
from sglang_dflash.errors import DFlashError
from tests.support.configs import drafter

SHAPES = expected_shapes(DrafterConfig.from_dict(drafter()))


def report(tensors: dict[str, tuple[int, ...]], **changes: Any) -> LoadReport:
    result = LoadReport(DrafterConfig.from_dict(drafter(**changes)))
    list(result.place((name, torch.empty(shape, device="meta")) for name, shape in tensors.items()))
    return result


def test_expects_every_layer_and_the_context_projection() -> None:
    assert SHAPES["fc.weight"] == (64, 3 * 64)
    assert SHAPES["layers.1.self_attn.q_proj.weight"] == (64, 64)
    assert SHAPES["layers.1.self_attn.k_proj.weight"] == (32, 64)
    assert not any(name.endswith("bias") for name in SHAPES)
    assert len(SHAPES) == 2 * 11 + 3


def test_biases_are_expected_only_if_configured() -> None:
    with_bias = expected_shapes(DrafterConfig.from_dict(drafter(attention_bias=True)))
    assert {name.split(".")[3] for name in with_bias if name.endswith("bias")} == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
    }


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("layers.0.self_attn.k_proj.weight", ("layers.0.self_attn.qkv_proj.weight", "k")),
        ("layers.3.mlp.up_proj.weight_scale", ("layers.3.mlp.gate_up_proj.weight_scale", 1)),
        ("layers.0.self_attn.k_norm.weight", ("layers.0.self_attn.k_norm.weight", None)),
        ("fc.weight", ("fc.weight", None)),
    ],
)
def test_parts_load_into_fused_modules(name: str, expected: tuple[str, object]) -> None:
    assert destination(name) == expected


def test_a_complete_checkpoint_passes() -> None:
    report(SHAPES).check(complete=True)


def test_every_problem_is_named() -> None:
    tensors = {**SHAPES, "embed_tokens.weight": (1024, 64), "norm.weight": (65,)}
    del tensors["layers.0.mlp.gate_proj.weight"]
    with pytest.raises(DFlashError) as error:
        report(tensors).check(complete=True)
    text = str(error.value)
    assert "missing: layers.0.mlp.gate_proj.weight, norm.weight" in text
    assert "unexpected: embed_tokens.weight" in text
    assert "norm.weight is [65], not [64]" in text


def test_a_partial_update_may_omit_tensors_and_adds_none() -> None:
    report({"fc.weight": SHAPES["fc.weight"]}).check(complete=False)
    with pytest.raises(DFlashError, match="unexpected: fd.weight"):
        report({"fd.weight": (1,)}).check(complete=False)


def test_a_quantised_checkpoint_is_compared_by_module() -> None:
    tensors = {name.replace("proj.weight", "proj.weight_packed"): (1,) for name in SHAPES}
    report(tensors, quantization_config={"quant_method": "fp8"}).check(complete=True)
    del tensors["layers.1.self_attn.o_proj.weight_packed"]
    with pytest.raises(
        DFlashError, match=r"missing: layers\.1\.self_attn\.o_proj;|missing: layers\.1\.self_attn\.o_proj\)"
    ):
        report(tensors, quantization_config={"quant_method": "fp8"}).check(complete=True)
