"""Which worker serves DFLASH: this package's, or SGLang's own with the reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from sglang_dflash.drafter.dequantise import is_set_aside
from sglang_dflash.drafter.formats import FULL, text_config
from sglang_dflash.errors import DFlashError, Finding, error, raise_first_error
from sglang_dflash.plan.device import Device
from sglang_dflash.plan.pair import Pair
from sglang_dflash.plan.settings import OURS, SWITCH, Settings

ON_ROCM = "the GPU is AMD's (ROCm)"
SKIP_GATHER = "SGLANG_SCHEDULER_SKIP_ALL_GATHER"

# kind of target -> its model types, and the test that runs it (docs/compatibility.md)
PROVEN = {
    "dense, full attention": (
        {"llama", "qwen2", "qwen3", "qwen3_vl", "qwen3_vl_text"},
        "tests/serving/test_dflash_equality.py",
    ),
    "mixture of experts, full attention": (
        {"qwen3_moe", "qwen3_vl_moe", "qwen3_vl_moe_text"},
        "tests/serving/test_dflash_equality.py",
    ),
    "hybrid, gated delta net and full attention": (
        {"qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"},
        "tests/serving/test_cards.py",
    ),
}
# Model types whose embedding is whole in each DP-attention group: a drafter embeds at times when no other group does.
LOCAL_EMBEDDING = set[str]().union(*(model_types for model_types, _ in PROVEN.values())) - {"llama"}
_PROVEN_LAYERS = {FULL, "linear_attention"}


def unproven_kind(target: Mapping[str, Any]) -> str | None:
    """Return the parts of a target that no test of this package runs, or None."""
    text = text_config(target)
    layers, family = {*map(str, text.get("layer_types") or ())}, str(text.get("model_type"))
    kinds = {"KDA states": "linear_attn_config" in text, "latent attention (MLA)": text.get("kv_lora_rank")}
    kinds |= {f"layers of the type {kind}": True for kind in sorted(layers - _PROVEN_LAYERS)}
    if not any(kinds.values()):
        kinds = {f"model_type {family}": not any(family in model_types for model_types, _ in PROVEN.values())}
    return ", ".join(kind for kind, applies in kinds.items() if applies) or None


def refuse_builtin(device: Device) -> None:
    """Raise DFlashError where SGLang's own worker cannot run."""
    if device.kind == "cpu":
        raise DFlashError(
            f"{SWITCH}=builtin selects SGLang's own worker, which does not run on a CPU",
            expected="this package's worker on the CPU platform",
            remedy=f"unset {SWITCH}, or serve on a GPU",
        )


def left_untouched(settings: Settings, pair: Pair, device: Device) -> str | None:
    """Return why this package leaves a pair to SGLang's worker unchecked, or None.

    Raises:
        DFlashError: neither worker serves the pair.
    """
    if device.is_rocm:
        reason = ON_ROCM
    else:
        pair.check_type()
        kind = unproven_kind(pair.target)
        if kind is None or settings.variable(SWITCH) == OURS:
            return None
        reason = f"no test of sglang-dflash runs a target with {kind} ({SWITCH}={OURS} serves it)"
    raise_first_error(_served_by_neither(reason, pair, device))
    return reason


def reason_for_builtin(settings: Settings, pair: Pair, device: Device) -> str | None:
    """Return why SGLang's own worker serves a pair that is not left untouched; None if ours does.

    Raises:
        DFlashError: DP attention lacks a condition, the megakernel is requested, or neither worker serves the pair.
    """
    is_other = device.kind == "gpu" and not (settings.device or "cuda").startswith("cuda")
    reasons = {
        f"the drafter type is {pair.kind}": pair.kind,
        f"the device is {settings.device}": is_other,
        "context parallelism is used": settings.attn_cp_size > 1 and settings.groups == 1,
        "--enable-watermark is used": settings.enable_watermark,
        "--speculative-accept-threshold-single is not lossless": settings.speculative_accept_threshold_single != 1.0,
        "--speculative-accept-threshold-acc is not lossless": settings.speculative_accept_threshold_acc != 1.0,
    }
    reason = next((reason for reason, applies in reasons.items() if applies), None)
    refused = _served_by_neither(reason, pair, device) if reason else _not_by_ours(settings, pair, device)
    raise_first_error(refused)
    return reason


def _served_by_neither(reason: str, pair: Pair, device: Device) -> Iterator[Finding]:
    if not pair.has_drafter:
        yield error(
            f"{reason}, and there is no drafter",
            expected="this package's worker, which copies blocks without one",
            remedy="set --speculative-draft-model-path, or change what is named",
        )
    elif is_set_aside(pair.drafter_files.published):
        yield error(
            f"{reason}, with a quantised drafter",
            expected="this package's worker, which dequantises it",
            remedy=f"use the drafter's plain weights, or {SWITCH}=builtin for SGLang's own worker and layers",
        )
    elif device.kind == "cpu":
        yield error(
            f"{reason}, on the CPU platform",
            expected="a DFlash or DFlash2 drafter without this option",
            remedy="run this pair on a GPU, where SGLang's own worker supports it",
        )


def _not_by_ours(settings: Settings, pair: Pair, device: Device) -> Iterator[Finding]:
    if settings.groups > 1:
        builtin = "" if device.kind == "cpu" else f", or set {SWITCH}=builtin to try SGLang's own worker"
        for refused in _without_dp_attention(settings, pair):
            value = f"DP attention over {settings.groups} groups of ranks with {refused.value}"
            yield replace(refused, value=value, remedy=refused.remedy + builtin)
    if settings.enable_nvidia_megakernel:
        yield error(
            "--enable-nvidia-megakernel replaces the forward pass of decode and verify steps",
            expected="the target's own forward pass, which this package captures in CUDA graphs",
            remedy=f"{SWITCH}=builtin for SGLang's own worker, or leave --enable-nvidia-megakernel out",
        )


def _without_dp_attention(settings: Settings, pair: Pair) -> Iterator[Finding]:
    # on GPUs too: SGLang's worker would serve silently, with an eager drafter and one width
    family, skip_gather = str(pair.text.get("model_type")), settings.variable(SKIP_GATHER)
    tied = pair.target.get("tie_word_embeddings", pair.text.get("tie_word_embeddings"))
    if not settings.enable_dp_lm_head:
        yield error(
            "one LM head for all ranks",
            expected="a whole LM head per group: the drafter predicts with the target's, at times when no other group "
            "does",
            remedy="add --enable-dp-lm-head",
        )
    if settings.attn_cp_size > 1:
        yield error("context parallelism", expected="--attn-cp-size 1", remedy="leave --attn-cp-size out")
    if skip_gather.lower() in ("1", "true", "t", "yes", "y", "on"):
        yield error(
            f"{SKIP_GATHER}={skip_gather}",
            expected="the scheduler's gathering before each step, with which all ranks agree on a block width",
            remedy=f"unset {SKIP_GATHER}",
        )
    if settings.disaggregation_mode != "null":
        yield error(
            f"--disaggregation-mode {settings.disaggregation_mode}",
            expected="prefill and decoding in one server",
            remedy="use --tp-size without DP attention in a disaggregated pair",
        )
    if family not in LOCAL_EMBEDDING:
        yield error(
            f"a target of the type {family}, whose embedding all ranks divide",
            expected=f"an embedding per group, as in {', '.join(sorted(LOCAL_EMBEDDING))}",
            remedy="use --tp-size without DP attention",
        )
    if settings.sharing > 1 and tied and family.startswith("qwen3_5"):
        yield error(
            f"{settings.sharing} ranks per group, and a tied LM head that SGLang does not divide",
            expected="one rank per group, or a target with a separate LM head",
            remedy=f"set --attn-dp-size {settings.tp_size}",
        )
