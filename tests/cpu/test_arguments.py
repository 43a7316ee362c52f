"""Server arguments on a CPU: refused pairs, mapped GPU-only choices, thread and core defaults, pool sizes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.configs.model_config import AttentionArch
from transformers import PretrainedConfig

from sglang_dflash.errors import DFlashError
from sglang_dflash_cpu import threads
from sglang_dflash_cpu.arguments import CHOICES, _defaults, check_before_model, check_pair, cpu_values
from sglang_dflash_cpu.layers import ATTENTION_BACKEND

# As SGLang leaves them without a flag.
UNSET = ("attention_backend", "sampling_backend", "speculative_draft_attention_backend") + tuple(
    f"linear_attn_{phase}_backend" for phase in ("prefill", "decode", "verify")
)
DEFAULTS: dict[str, Any] = {choice.field: choice.instead for choice in CHOICES} | dict.fromkeys(UNSET)


def test_arguments_left_alone_change_silently() -> None:
    changes, warnings = cpu_values(DEFAULTS.__getitem__)
    assert changes == {"attention_backend": ATTENTION_BACKEND, "sampling_backend": "pytorch"}
    assert warnings == []


@pytest.mark.parametrize(
    ("field", "value", "becomes"),
    [
        ("attention_backend", "fa3", ATTENTION_BACKEND),
        ("attention_backend", "trtllm_mha", ATTENTION_BACKEND),
        ("speculative_draft_attention_backend", "fa4", ATTENTION_BACKEND),
        ("linear_attn_decode_backend", "flashinfer", "triton"),
        ("linear_attn_prefill_backend", "flashinfer", "triton"),
        ("prefill_attention_backend", "fa3", None),
        ("flashinfer_allreduce_fusion_backend", "auto", None),
        ("enable_torch_compile", True, False),
    ],
)
def test_a_gpu_choice_maps_with_one_warning(field: str, value: Any, becomes: Any) -> None:
    changes, warnings = cpu_values({**DEFAULTS, field: value}.__getitem__)
    assert changes[field] == becomes
    assert len(warnings) == 1
    assert "--" + field.replace("_", "-") in warnings[0]


def arguments(**fields: Any) -> SimpleNamespace:
    unset = dict.fromkeys(("attention_backend", "prefill_attention_backend", "decode_attention_backend"))
    return SimpleNamespace(**{**unset, "model_path": "Qwen/Qwen3.5-4B", **fields})


def test_an_unknown_attention_backend_and_a_missing_model_are_named(tmp_path: Path) -> None:
    for path in (str(tmp_path), "Qwen/Qwen3.5-4B", "s3://bucket/a/b"):
        check_before_model(arguments(model_path=path, attention_backend="fa3"), ["fa3"])
    for wrong, named in (
        ({"attention_backend": "fa33"}, "attention_backend='fa33'"),
        ({"model_path": str(tmp_path / "nothing")}, "does not exist"),
    ):
        with pytest.raises(DFlashError, match=named):
            check_before_model(arguments(**wrong), ["fa3"])


@given(st.integers(1, 64), st.integers(1, 16))
def test_every_rank_gets_cores_and_no_core_idles(cores: int, ranks: int) -> None:
    groups = threads.cores_per_rank(list(range(cores)), ranks)
    assert len(groups) == ranks and all(groups)
    if ranks <= cores:
        assert sorted(core for group in groups for core in group) == list(range(cores))


def test_environment_defaults_leave_the_users_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "SGLANG_MAMBA_CONV_DTYPE", threads.BIND_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    of_one = {"OMP_NUM_THREADS": "1", "SGLANG_MAMBA_CONV_DTYPE": "float32"}
    assert threads.environment_defaults(1, "float32") == of_one
    of_two = threads.environment_defaults(2, "float32")
    assert len(of_two[threads.BIND_VARIABLE].split("|")) == 2
    assert of_two["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] == "false"
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    monkeypatch.setenv("SGLANG_MAMBA_CONV_DTYPE", "bfloat16")
    assert threads.environment_defaults(1, "float32") == {}


def test_a_pool_is_capped_even_if_little_memory_is_free_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang would take a fraction of what is free when it makes the pools: 12 GB for a tiny model."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=16 << 30, available=64 << 20))
    dense = {"num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128}
    hf = PretrainedConfig(**dense)
    model = SimpleNamespace(hf_text_config=hf, dtype=torch.float32, context_len=4096, head_dim=32, **dense)
    cfg = SimpleNamespace(disaggregation_mode="null", max_running_requests=None, max_total_tokens=None)
    assert _defaults(cfg, model)["max_total_tokens"] == 32 * 4096


@pytest.fixture(autouse=True)
def no_recurrent_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's answers for a dense target: it reads them from more of a ``ModelConfig`` than these tests build."""
    for name in ("mambaish_config", "hybrid_gdn_config"):
        monkeypatch.setattr(f"sglang.srt.configs.hybrid_arch.{name}", lambda config: None)


@pytest.mark.parametrize(
    ("model", "config", "words"),
    [
        ({"attention_arch": AttentionArch.SSM}, {}, "Target uses SSM attention"),
        ({"is_encoder_decoder": True}, {}, "Target is an encoder-decoder model"),
        ({}, {"quantization_config": {"quant_method": "awq"}}, "Target with awq quantisation"),
        ({}, {"quantization_config": {"bits": 4}}, "Target with unnamed quantisation"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_has_no_torch_implementation_is_refused(model: dict[str, Any], config: dict[str, Any], words: str) -> None:
    """Further cases, in a server: ``tests/launch/test_broken_pairs.py``."""
    hf_config = PretrainedConfig(architectures=["Target"], **config)
    usual = {"attention_arch": AttentionArch.MHA, "is_encoder_decoder": False, "hf_config": hf_config}
    cfg = SimpleNamespace(quantization=None, kv_cache_dtype="auto")
    with pytest.raises(DFlashError, match=words):
        check_pair(SimpleNamespace(**{**usual, **model}), cfg)
