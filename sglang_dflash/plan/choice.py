"""Which worker serves DFLASH: this package's, or SGLang's own with the reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from sglang_dflash.drafter.dequantise import is_set_aside
from sglang_dflash.drafter.formats import FULL, text_config
from sglang_dflash.errors import DFlashError, Finding, error, raise_first_error
from sglang_dflash.plan.device import Device
from sglang_dflash.plan.layers import has_mamba
from sglang_dflash.plan.pair import Pair
from sglang_dflash.plan.settings import OURS, SWITCH, Settings

ON_ROCM = "the GPU is AMD's (ROCm)"
SKIP_GATHER = "SGLANG_SCHEDULER_SKIP_ALL_GATHER"

_EQUALITY, _CARDS, _IMAGES, _FAMILIES = (
    f"tests/{name}.py"
    for name in ("serving/test_dflash_equality", "serving/test_cards", "serving/test_images", "families/test_families")
)


class Proof(NamedTuple):
    """What has run targets of one kind.

    Attributes:
        tests: by model type of the text configuration, the test that serves it on the CPU platform and compares its
            tokens and captured layers.
        mechanisms: those of its layers that need more than full attention. ``tests/rehearsal`` runs each in SGLang's
            GPU kernels.
    """

    tests: Mapping[str, str]
    mechanisms: frozenset[str] = frozenset()


_SLIDES, _LATENT, _MAMBA = "layers of the type sliding_attention", "latent attention (MLA)", "Mamba2 layers"
_DELTA_NET = "layers of the type linear_attention"
# By kind of target (docs/compatibility.md)
PROVEN = {
    "dense, full attention": Proof(
        {"qwen3": _EQUALITY, **dict.fromkeys(("qwen3_vl", "qwen3_vl_text"), _IMAGES)}
        | dict.fromkeys(("glm4", "llama", "ministral3", "mistral", "qwen2"), _FAMILIES)
    ),
    "mixture of experts, full attention": Proof(
        dict.fromkeys(("glm4_moe", "minimax_m2", "qwen3_moe"), _FAMILIES)
        | dict.fromkeys(("qwen3_vl_moe", "qwen3_vl_moe_text"), _IMAGES)
    ),
    "hybrid, gated delta net and full attention": Proof(
        dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _CARDS),
        frozenset({_DELTA_NET}),
    ),
    "sliding and full attention": Proof({"gpt_oss": _FAMILIES}, frozenset({_SLIDES})),
    "the same, with K/V of two shapes": Proof({"gemma4_text": _FAMILIES}, frozenset({_SLIDES})),
    "latent attention": Proof(
        dict.fromkeys(("deepseek_v3", "glm4_moe_lite", "kimi_k2"), _FAMILIES), frozenset({_LATENT})
    ),
    "hybrid, Mamba2 and full attention": Proof({"nemotron_h": _FAMILIES}, frozenset({_MAMBA})),
}
# Model types whose embedding is whole in each DP-attention group, since a drafter embeds at times when no other group
# does, and which a test serves so.
LOCAL_EMBEDDING = {
    *("qwen2", "qwen3", "qwen3_vl", "qwen3_vl_text", "qwen3_moe", "qwen3_vl_moe", "qwen3_vl_moe_text"),
    *("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
}
# Model types of text configurations whose layers SGLang 0.5.23 cannot capture, so that no worker serves them
LEFT = {
    "gemma3_text": "SGLang captures the layers of Gemma 3 without the residual: its drafters would read wrong states",
    "qwen4_exp_text": "SGLang captures no layers of Qwen3.8-Flash-Next, and no DFlash drafter is published for it",
}


def unproven_kind(target: Mapping[str, Any]) -> str | None:
    """Return the parts of a target that no test of this package runs, or None."""
    text = text_config(target)
    family = str(text.get("model_type"))
    proof = _proof(text)
    kinds = _mechanisms(text) - (proof.mechanisms if proof is not None else {_DELTA_NET})
    if not kinds and proof is None:
        kinds = {f"model_type {family}"}
    return ", ".join(sorted(kinds)) or None


def _proof(text: Mapping[str, Any]) -> Proof | None:
    return next((proof for proof in PROVEN.values() if text.get("model_type") in proof.tests), None)


def _mechanisms(text: Mapping[str, Any]) -> set[str]:
    found = {"KDA states": "linear_attn_config" in text, _LATENT: text.get("kv_lora_rank"), _MAMBA: has_mamba(text)}
    found["sparse attention (DSA)"] = text.get("index_topk")
    of_layers = {*map(str, text.get("layer_types") or ())} - {FULL, "attention", "mamba", "mlp", "moe"}
    return {name for name, applies in found.items() if applies} | {f"layers of the type {kind}" for kind in of_layers}


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
        if not (reason := LEFT.get(str(pair.text.get("model_type")), "")):
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
            remedy="serve it without --speculative-algorithm DFLASH"
            if reason in LEFT.values()
            else "run this pair on a GPU, where SGLang's own worker supports it",
        )


def _not_by_ours(settings: Settings, pair: Pair, device: Device) -> Iterator[Finding]:
    if settings.groups > 1:
        builtin = "" if device.kind == "cpu" else f", or set {SWITCH}=builtin to try SGLang's own worker"
        for refused in _without_dp_attention(settings, pair):
            value = f"DP attention over {settings.groups} groups of ranks with {refused.value}"
            yield replace(refused, value=value, remedy=refused.remedy + builtin)
    yield from _untried(settings, pair)
    if settings.enable_nvidia_megakernel:
        yield error(
            "--enable-nvidia-megakernel replaces the forward pass of decode and verify steps",
            expected="the target's own forward pass, which this package captures in CUDA graphs",
            remedy=f"{SWITCH}=builtin for SGLang's own worker, or leave --enable-nvidia-megakernel out",
        )


def _untried(settings: Settings, pair: Pair) -> Iterator[Finding]:
    proof = _proof(pair.text)
    kinds = ", ".join(sorted(proof.mechanisms - {_DELTA_NET})) if proof is not None else ""
    uses = {
        f"--disaggregation-mode {settings.disaggregation_mode}": settings.disaggregation_mode != "null",
        "--enable-lora": settings.enable_lora,
    }
    for use in (use for use, applies in uses.items() if kinds and applies):
        yield error(
            f"{use} for a target with {kinds}",
            expected="one server without adapters: no test runs such a target otherwise",
            remedy=f"leave {use.partition(' ')[0]} out, or set {SWITCH}=builtin to try SGLang's own worker",
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
            f"a target of the type {family}",
            expected=f"a type whose embedding each group holds, with a test: {', '.join(sorted(LOCAL_EMBEDDING))}",
            remedy="use --tp-size without DP attention",
        )
    if settings.sharing > 1 and tied and family.startswith("qwen3_5"):
        yield error(
            f"{settings.sharing} ranks per group, and a tied LM head that SGLang does not divide",
            expected="one rank per group, or a target with a separate LM head",
            remedy=f"set --attn-dp-size {settings.tp_size}",
        )
