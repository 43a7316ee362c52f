"""Attention backends against GPUs, as SGLang would refuse them after loading."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from sglang_dflash.check.flags import parse
from sglang_dflash.check.machine import GPUS
from sglang_dflash.errors import Finding
from sglang_dflash.launch.attention import default_backend
from sglang_dflash.launch.device import UNKNOWN_GPU, Device
from sglang_dflash.launch.launch import DRAFT_BACKENDS, OUR_BACKEND, Launch
from sglang_dflash.launch.plan import decide
from sglang_dflash.launch.rules import EARLY
from sglang_dflash.launch.settings import ONE_FORWARD_SWITCH, Settings
from sglang_dflash.launch.states import needs_bfloat16_states
from tests.launch.commands import FOLDER
from tests.support.configs import drafter, finding, launch_of, target

HOPPER, BLACKWELL = GPUS["h200"], GPUS["b200"]
LOCAL = replace(BLACKWELL, is_local=True)


def options(*flags: str) -> Settings:
    return parse(flags, target="t", drafter="d")[0]


def refused(launch: Launch) -> list[Finding]:
    """Errors about attention backends."""
    flags = [about for about in EARLY if about.startswith("--")]
    return [each for about in flags if (each := finding(about, launch)).level != "ok"]


GATED = launch_of(drafter(), target(layer_types=["linear_attention", "full_attention"] * 4))
TARGET, DRAFTER = "--attention-backend", "--speculative-draft-attention-backend"


@pytest.mark.parametrize(
    ("gpu", "flag", "name", "fits"),
    [
        ("h200", TARGET, "fa3", True),
        ("a100", TARGET, "fa3", True),
        ("b200", TARGET, "fa3", False),
        ("rtx-pro-6000", TARGET, "fa3", False),
        ("b200", DRAFTER, "fa3", False),
        ("b200", TARGET, "trtllm_mha", True),
    ],
)
def test_a_backend_that_the_gpu_cannot_run_is_an_error(gpu: str, flag: str, name: str, fits: bool) -> None:
    found = refused(replace(GATED, settings=options(flag, name), device=GPUS[gpu]))
    assert len(found) == (0 if fits else 1)
    assert all(name in each.value and GPUS[gpu].name in each.value and flag in each.remedy for each in found)


PLAIN, HEADS_OF_80 = launch_of(drafter()), launch_of(drafter(head_dim=80))
SLIDES = launch_of(drafter(layer_types=["sliding_attention"] * 2, sliding_window=64))
BIDIRECTIONAL = launch_of(drafter(layer_types=["sliding_attention"] * 2, sliding_window=64, is_causal=False))
MIXED = launch_of(drafter(layer_types=["sliding_attention", "full_attention"], sliding_window=64))
EXACT, UNIFIED = "--enable-deterministic-inference", "--enable-unified-memory"


@pytest.mark.parametrize(
    ("flags", "pair", "gpu", "served"),
    [
        ((), PLAIN, "h200", "fa3"),
        ((), SLIDES, "b200", "trtllm_mha"),
        ((), MIXED, "b200", "fa4"),
        ((), BIDIRECTIONAL, "b200", "dflash"),
        ((DRAFTER, "trtllm_mha"), BIDIRECTIONAL, "b200", "trtllm_mha"),
        *(((), pair, gpu, "dflash") for pair in (PLAIN, SLIDES) for gpu in ("rtx5090", "dgx-spark", "rtx3090", "l40s")),
        ((TARGET, "flashinfer"), SLIDES, "h200", "dflash"),
        ((TARGET, "triton"), PLAIN, "h200", "dflash"),
        ((TARGET, "flashinfer", DRAFTER, "fa3"), SLIDES, "h200", "fa3"),
        ((DRAFTER, "flashinfer"), SLIDES, "dgx-spark", "flashinfer"),
        ((DRAFTER, "triton"), SLIDES, "dgx-spark", "triton"),
        ((DRAFTER, "dflash"), SLIDES, "h200", "dflash"),
        (("--kv-cache-dtype", "fp8_e4m3"), SLIDES, "dgx-spark", "dflash"),
        (("--kv-cache-dtype", "nvfp4"), SLIDES, "dgx-spark", "flashinfer"),
        ((UNIFIED,), SLIDES, "dgx-spark", "flashinfer"),
        ((EXACT, TARGET, "triton"), SLIDES, "dgx-spark", "triton"),
        ((), HEADS_OF_80, "dgx-spark", "flashinfer"),
    ],
)
def test_our_kernel_serves_the_drafter_where_sglang_would_take_flashinfer_or_triton(
    flags: tuple[str, ...], pair: Launch, gpu: str, served: str
) -> None:
    launch = replace(pair, settings=options(*flags), device=GPUS[gpu])
    found = finding("drafter's attention backend", launch)
    assert (found.level, found.value) == ("ok", served)
    fits = served != "flashinfer" or DRAFTER in flags
    found = finding("drafter's attention backend", launch.changed(speculative_draft_attention_backend="dflash"))
    assert (found.level == "ok") is (fits and EXACT not in flags), found


@pytest.mark.parametrize(("pair", "gpu"), [(PLAIN, "h200"), (SLIDES, "b200"), (MIXED, "b200"), (PLAIN, "rtx5090")])
def test_with_one_forward_our_kernel_serves_the_drafter_on_every_gpu(pair: Launch, gpu: str) -> None:
    launch = replace(pair, settings=replace(options(), environ={ONE_FORWARD_SWITCH: "1"}), device=GPUS[gpu])
    assert launch.draft_backend == OUR_BACKEND
    unserved = launch.changed(kv_cache_dtype="nvfp4"), launch.changed(speculative_draft_attention_backend="fa3")
    assert OUR_BACKEND not in [each.draft_backend for each in unserved]


@pytest.mark.parametrize(
    "flags",
    [("--tp-size", "2"), ("--enable-pdmux",), ("--cuda-graph-backend-decode", "breakable"), (DRAFTER, "fa3")],
    ids=" ".join,
)
def test_one_forward_has_no_effect_with_ranks_segments_or_another_backend(flags: tuple[str, ...]) -> None:
    settings = replace(options(*flags), environ={ONE_FORWARD_SWITCH: "1"})
    launch = replace(PLAIN, settings=settings, device=GPUS["h200"])
    found = finding("drafter's attention backend", launch)
    assert found.level == "warn" and flags[-1] in found.value and ONE_FORWARD_SWITCH in found.remedy
    assert launch.draft_backend == "fa3" and not decide(launch).one_forward


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


@pytest.mark.parametrize(
    ("name", "gpu", "flag", "reason", "best"),
    [
        ("gpt-oss-20b", "l40s", None, None, "triton"),
        ("gpt-oss-20b", "h200", "trtllm_mha", None, "fa3"),
        ("gpt-oss-20b", "b200", "fa3", "compute capabilities 8 and 9 alone", "trtllm_mha"),
        ("gemma4-31b", "b200", None, None, "trtllm_mha"),
        ("kimi-k26-nvfp4", "b200", None, None, "trtllm_mla"),
        ("glm47-flash", "h200", "flashmla", None, "fa3"),
        ("qwen38-27b", "b200", "fa4", "take heads of up to 128", "trtllm_mha"),
        ("qwen38-27b", "h200", "fa4", None, "fa3"),
        ("gemma4-31b", "b200", "fa4", "take heads of up to 128", "trtllm_mha"),
        ("muse-glimmer-30b", "h200", "flashinfer", "ignores the window of sliding layers", "fa3"),
        ("muse-glimmer-30b", "l40s", None, "SGLang's choice flashinfer on NVIDIA L40S", "fa3"),
    ],
)
def test_a_backend_that_cannot_verify_a_family_is_an_error(
    name: str, gpu: str, flag: str | None, reason: str | None, best: str
) -> None:
    """And the remedy is SGLang's choice, or the first that can."""
    models = {"model_path": str(FOLDER / name), "speculative_draft_model_path": ""}
    launch = Launch.of(options(*((TARGET, flag) if flag else ())).changed(**models), GPUS[gpu])
    found = refused(launch)
    assert len(found) == (reason is not None), found
    assert reason is None or (reason in found[0].value and found[0].remedy == f"set {TARGET} {best}")
    assert reason or default_backend(launch.text, GPUS[gpu]) == best


@pytest.mark.parametrize("flag", ["--linear-attn-verify-backend", "--linear-attn-decode-backend"])
@pytest.mark.parametrize(
    ("machine", "dtype"),
    [(BLACKWELL, None), (BLACKWELL, "bfloat16"), (BLACKWELL, "float32"), (HOPPER, None), (UNKNOWN_GPU, None)],
)
def test_flashinfer_on_blackwell_needs_bfloat16_states(flag: str, machine: Device, dtype: str | None) -> None:
    """For a verify, with a Triton decode too."""
    settings = options(flag, "flashinfer", *(("--mamba-ssm-dtype", dtype) if dtype else ()))
    launch = Launch.of(settings, machine)
    assert needs_bfloat16_states(launch) is (machine is BLACKWELL and dtype is None)
