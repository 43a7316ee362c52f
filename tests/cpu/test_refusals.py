"""Targets and drafters that the CPU platform cannot serve are refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from transformers import PretrainedConfig

from sglang_dflash import upstream
from sglang_dflash.errors import DFlashError
from sglang_dflash.upstream import AttentionArch
from sglang_dflash_cpu.arguments import check_pair

pytestmark = pytest.mark.sglang

PLAIN: dict[str, Any] = {
    "quantization": None,
    "kv_cache_dtype": "auto",
    "enable_lora": None,
    "lora_paths": None,
    "speculative_draft_model_path": None,
    "speculative_draft_model_revision": None,
    "speculative_draft_model_quantization": None,
}


@pytest.fixture(autouse=True)
def no_recurrent_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's answers for a dense target: it reads them from more of a ``ModelConfig`` than these tests build."""
    for name in ("mambaish_config", "hybrid_gdn_config"):
        monkeypatch.setattr(upstream, name, lambda config: None)


def check(config: dict[str, Any] | None = None, *, arguments: dict[str, Any] | None = None, **model: Any) -> None:
    hf_config = PretrainedConfig(architectures=["Target"], **(config or {}))
    usual = {"attention_arch": AttentionArch.MHA, "is_encoder_decoder": False, "hf_config": hf_config}
    check_pair(SimpleNamespace(**{**usual, **model}), SimpleNamespace(**{**PLAIN, **(arguments or {})}))


def test_a_plain_decoder_is_served() -> None:
    check()
    check(arguments={"quantization": "unquant", "kv_cache_dtype": "float32"})


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ({"attention_arch": AttentionArch.MLA}, "Target uses MLA attention"),
        ({"is_encoder_decoder": True}, "Target is an encoder-decoder model"),
        ({"arguments": {"quantization": "fp8"}}, "Target with fp8 quantisation"),
        ({"config": {"quantization_config": {"quant_method": "awq"}}}, "Target with awq quantisation"),
        ({"config": {"quantization_config": {"bits": 4}}}, "Target with unnamed quantisation"),
        ({"arguments": {"kv_cache_dtype": "fp8_e4m3"}}, "--kv-cache-dtype fp8_e4m3"),
        ({"arguments": {"enable_lora": True}}, "--enable-lora on a CPU"),
        ({"arguments": {"enable_lora": True, "lora_paths": ["a"]}}, "--lora-paths on a CPU"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_has_no_torch_implementation_is_refused(case: dict[str, Any], words: str) -> None:
    with pytest.raises(DFlashError, match=words):
        check(**case)


def test_recurrent_layers_other_than_gated_delta_net_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "mambaish_config", lambda config: config)
    with pytest.raises(DFlashError, match="Target has recurrent layers other than gated-delta-net"):
        check()
    monkeypatch.setattr(upstream, "hybrid_gdn_config", lambda config: config)
    check()


@pytest.mark.parametrize("flag", [None, "unquant", "awq"])
def test_quantised_layers_for_the_drafter_are_refused(flag: str | None) -> None:
    named = {"speculative_draft_model_path": "drafter", "speculative_draft_model_quantization": flag}
    if flag != "awq":
        check(arguments=named)
        return
    with pytest.raises(DFlashError, match="--speculative-draft-model-quantization awq on a CPU"):
        check(arguments=named)
