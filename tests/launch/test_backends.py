"""Attention backends against GPUs, as SGLang would refuse them after loading."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from sglang_dflash.check.machine import GPUS
from sglang_dflash.launch.attention import default_backend
from sglang_dflash.launch.launch import DRAFT_BACKENDS, OUR_BACKEND


@pytest.mark.sglang
@pytest.mark.parametrize("gpu", GPUS)
def test_the_default_backend_is_sglangs(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sglang")
    from sglang.srt.arg_groups import choices, model_override_base

    major, minor = GPUS[gpu].capability or (0, 0)
    facts = {"is_sm100": major == 10, "is_hopper_with_cuda_12_3": major == 9, "is_hip": False, "has_flashinfer": True}
    monkeypatch.setattr(model_override_base, "get_platform", lambda: SimpleNamespace(**facts))
    monkeypatch.setattr(model_override_base, "current_platform", SimpleNamespace(is_out_of_tree=lambda: False))
    monkeypatch.setattr(model_override_base, "is_no_spec_infer_or_topk_one", lambda _: True)
    hf = SimpleNamespace(architectures=[])
    config = SimpleNamespace(hf_config=hf, has_asymmetric_kv=False, has_attention_sinks=0)
    args = SimpleNamespace(speculative_algorithm="DFLASH", speculative_eagle_topk=None)
    assert default_backend({}, GPUS[gpu]) == model_override_base.get_default_attn_backend(args, False, config)
    latent = default_backend({"kv_lora_rank": 512}, GPUS[gpu])
    assert latent == model_override_base.get_default_attn_backend(args, True, config)
    # a server that an earlier test prepared in this process has added ours
    assert set(choices.DRAFT_ATTENTION_BACKEND_CHOICES) - {"torch_dflash", OUR_BACKEND} == DRAFT_BACKENDS


@pytest.mark.sglang
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(
    ("family", "module", "function"),
    [
        ("gpt_oss", "gpt_oss", "_gpt_oss_overrides"),
        ("gemma4_text", "gemma4", "_gemma4_overrides"),
        ("deepseek_v3", "deepseek_v2", "_deepseek_family_overrides"),
    ],
)
def test_the_backend_of_a_family_is_sglangs(
    family: str, module: str, function: str, gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own choice, else the default of its kind of attention."""
    pytest.importorskip("sglang")
    overrides = import_module(f"sglang.srt.arg_groups.model_overrides.{module}")
    major, minor = GPUS[gpu].capability or (0, 0)
    facts = {f"is_sm{number}": major == number // 10 for number in (90, 100, 120)}
    facts |= dict.fromkeys(("is_xpu", "is_hip", "is_npu", "is_musa", "has_amx"), False)
    facts |= {"is_blackwell": major >= 10, "is_cuda": True, "device_capability": (major, minor)}
    view: Any = MagicMock(speculative_algorithm="DFLASH", speculative_eagle_topk=1, quantization=None)
    view.configure_mock(**dict.fromkeys(("attention_backend", "prefill_attention_backend", "page_size"), None))
    view.configure_mock(decode_attention_backend=None, moe_runner_backend="triton", enable_prefill_cp=False)
    view.configure_mock(enable_eplb=False, ep_num_redundant_experts=0, init_expert_location="trivial")
    for name, value in {
        "get_platform": lambda: SimpleNamespace(**facts),
        "resolving_view": lambda _: view,
        "model_config_of": lambda _: SimpleNamespace(quantization=None),
    }.items():
        monkeypatch.setattr(overrides, name, value, raising=False)
    hf = SimpleNamespace(architectures=["DeepseekV3ForCausalLM"], quantization_config=None)
    found = getattr(overrides, function)(view, hf).get("attention_backend")
    text = {"model_type": family} | ({"kv_lora_rank": 512} if family == "deepseek_v3" else {})
    other = {"kv_lora_rank": 512} if "kv_lora_rank" in text else {}
    assert default_backend(text, GPUS[gpu]) == (found or default_backend(other, GPUS[gpu]))
