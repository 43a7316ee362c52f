"""What we predict of SGLang, beside its own functions: dtypes, K/V, quantisation and kinds of targets."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt import configs
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp4Config, ModelOptFp8Config
from sglang.srt.mem_cache.kv_cache_dtype import configure_kv_cache_dtype
from sglang.srt.utils.hf_transformers.common import get_context_length, get_hf_text_config
from sglang.srt.utils.hf_transformers.config import get_config

from sglang_dflash.check.machine import GPUS
from sglang_dflash.errors import DFlashError
from sglang_dflash.launch.device import CPU
from sglang_dflash.launch.launch import Launch
from sglang_dflash.launch.which_worker import PROVEN, unproven_kind
from tests.support.cards import FOLDER as CARDS
from tests.support.configs import drafter, launch_of, target
from tests.support.configs import settings as arguments
from tests.support.files import load_config

pytestmark = pytest.mark.sglang
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": []}
MODELOPT_FP8 = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": []}
SCHEMES = ({}, {"type": "float", "num_bits": 8}, {"type": "float", "num_bits": 4}, {"type": "int", "num_bits": 8})
STORED: list[tuple[Any, dict[str, Any]]] = [
    (None, {}),
    (None, {"quant_method": "compressed-tensors", "kv_cache_scheme": SCHEMES[1]}),  # SGLang does not read it
    (Fp8Config, FP8),
    (Fp8Config, {**FP8, "kv_cache_quant_algo": "FP8"}),
    *((kind, {**stored, "kv_cache_scheme": scheme or None}) for scheme in SCHEMES
      for kind, stored in ((ModelOptFp4Config, NVFP4), (ModelOptFp8Config, MODELOPT_FP8))),
    (ModelOptFp4Config, {**NVFP4, "kv_cache_quant_algo": "FP8"}),
]  # fmt: skip
NAMES = ("auto", "fp8_e5m2", "fp8_e4m3", "mxfp8", "bf16", "bfloat16", "nvfp4", "fp4_mx_block16")
SERVED = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
TYPES = {**SERVED, "bf16": torch.bfloat16, "fp8_e5m2": torch.float8_e5m2, "fp8_e4m3": torch.float8_e4m3fn}
TYPES |= {"mxfp8": torch.float8_e4m3fn, "nvfp4": torch.float4_e2m1fn_x2, "fp4_mx_block16": torch.float4_e2m1fn_x2}


_LINEAR, _PART = {"rope_type": "linear", "factor": 2.0}, {"rope_type": "yarn", "factor": 4.0}
_YARN = {**_PART, "rope_theta": 10000000, "original_max_position_embeddings": 262144}
ROPES: list[dict[str, Any]] = [
    *({key: rope} for key in ("rope_parameters", "rope_scaling")
      for rope in (_YARN, _PART, {"factor": 2.0}, _LINEAR)),
    {"max_position_embeddings": 8192}, {"vision_config": {"depth": 3}}, {"rope_theta": 5000},
]  # fmt: skip


@pytest.mark.parametrize("name", ["Qwen3.5-27B", "Qwen3-Coder-Next"])
@pytest.mark.parametrize("stored", [{}, *({"rope_scaling": rope} for rope in (_YARN, _LINEAR))])
@pytest.mark.parametrize("override", [{}, *ROPES, *({"text_config": rope} for rope in ROPES[:9])], ids=json.dumps)
def test_overrides_are_merged_as_sglang_merges_them(
    name: str, stored: dict[str, Any], override: dict[str, Any], tmp_path: Path
) -> None:
    config = load_config(CARDS / name / "target")
    config.get("text_config", config).update(stored)
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = {"model_path": str(tmp_path), "json_model_override_args": json.dumps(override)}
    pair = Launch.of(arguments(**given), CPU)
    if "text_config" in override.keys() - config.keys():
        with pytest.raises(DFlashError, match="at the top level"):
            _ = pair.target
        return
    theirs = get_hf_text_config(get_config(str(tmp_path), trust_remote_code=False, model_override_args=override))
    assert pair.context == get_context_length(theirs)
    assert pair.text["vocab_size"] == theirs.vocab_size and pair.hybrid
    assert json.loads((tmp_path / "config.json").read_text()) == pair.target_files.config


@given(
    stored=st.sampled_from(STORED),
    name=st.sampled_from(NAMES),
    own=st.sampled_from((None, *NAMES)),
    served=st.sampled_from(sorted(SERVED)),
    backend=st.sampled_from((None, "fa3", "fa4", "flashinfer", "triton", "trtllm_mha")),
    gpu=st.sampled_from(sorted(GPUS)),
    slides=st.booleans(),
)
@settings(deadline=None)
def test_the_dtypes_of_kv_are_those_that_sglang_resolves(
    stored: tuple[Any, dict[str, Any]], name: str, own: str | None, served: str, backend: str | None, gpu: str,
    slides: bool,
) -> None:  # fmt: skip
    kind, declared = stored
    sliding = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 64} if slides else {}
    launch = launch_of(
        drafter(**sliding), target(quantization_config=declared) if declared else target(), GPUS[gpu], dtype=served,
        kv_cache_dtype=name, speculative_draft_kv_cache_dtype=own, speculative_draft_attention_backend=backend,
    )  # fmt: skip
    model = SimpleNamespace(quant_config=kind.from_config(declared) if kind else None)
    asked: dict[str, Any] = {"server_args_kv_cache_dtype": name, "model_dtype": SERVED[served], "is_dflash": True}
    asked |= {"speculative_draft_attention_backend": launch.draft_backend}
    _, theirs = configure_kv_cache_dtype(model=model, is_draft_worker=False, **asked)
    plain = SimpleNamespace(quant_config=None)
    _, drafts = configure_kv_cache_dtype(
        model=plain, is_draft_worker=True, speculative_draft_kv_cache_dtype=own, **asked
    )
    assert [TYPES[each] for each in launch.kv_dtypes] == [theirs, drafts]


@pytest.mark.parametrize("name", [name for name in vars(configs) if name.endswith("Config") and "Vision" not in name])
def test_a_kind_of_target_that_no_test_runs_is_left_to_sglang(name: str) -> None:
    """Every configuration that SGLang brings."""
    try:
        found = getattr(configs, name)().to_dict()
    except (TypeError, AttributeError, ValueError):
        pytest.skip("needs arguments")
    proven = {name for proof in PROVEN.values() for name in proof.tests}
    assert (unproven_kind(found) is None) == ((found.get("text_config") or found).get("model_type") in proven)
