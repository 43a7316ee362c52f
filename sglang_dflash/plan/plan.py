"""Decide at launch which worker serves DFLASH, and make the serving plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from sglang_dflash.drafter.dequantise import is_set_aside
from sglang_dflash.drafter.formats import FULL, text_config
from sglang_dflash.errors import DFlashError
from sglang_dflash.plan.device import Device
from sglang_dflash.plan.pair import Pair
from sglang_dflash.plan.serving import DraftWindow, Role, ServingPlan, context_window
from sglang_dflash.plan.settings import COPIES_SWITCH, OURS, SKIP_GATHER, SWITCH, Settings
from sglang_dflash.plan.widths import FLAG, WidthConfig

ON_ROCM = "the GPU is AMD's (ROCm)"

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
    kinds = []
    if "linear_attn_config" in text:
        kinds.append("KDA states")
    if text.get("kv_lora_rank"):
        kinds.append("latent attention (MLA)")
    kinds += [
        f"layers of the type {kind}" for kind in sorted({*map(str, text.get("layer_types") or ())} - _PROVEN_LAYERS)
    ]
    family = str(text.get("model_type"))
    if not kinds and not any(family in model_types for model_types, _ in PROVEN.values()):
        kinds.append(f"model_type {family}")
    return ", ".join(kinds) or None


def left_untouched(settings: Settings, pair: Pair, machine: Device) -> str | None:
    """Return why this package leaves a pair to SGLang's worker unchecked, or None."""
    if machine.is_rocm:
        return ON_ROCM
    _ = pair.kind  # refuses a type that SGLang does not serve either
    if settings.worker_switch != OURS and (kind := unproven_kind(pair.target)):
        return f"no test of sglang-dflash runs a target with {kind} ({SWITCH}={OURS} serves it)"
    return None


def reason_for_builtin(settings: Settings, pair: Pair, machine: Device) -> str | None:
    """Return why SGLang's own worker serves DFLASH; None if ours does.

    Raises:
        DFlashError: DP attention lacks a condition, the megakernel is requested, or neither worker serves the pair.
    """
    if settings.wants_builtin:
        return f"{SWITCH}=builtin"
    reason, on_cpu = _not_ours(settings, pair, machine), machine.kind == "cpu"
    if reason is None:
        if settings.groups > 1:
            _check_dp_attention(settings, pair, on_cpu)
        _refuse_megakernel(settings)
    elif not pair.has_drafter:
        raise DFlashError(
            f"{reason}, and there is no drafter",
            expected="this package's worker, which copies blocks without one",
            remedy="set --speculative-draft-model-path, or change what is named",
        )
    elif is_set_aside(pair.drafter_files.published):
        raise DFlashError(
            f"{reason}, with a quantised drafter",
            expected="this package's worker, which dequantises it",
            remedy=f"use the drafter's plain weights, or {SWITCH}=builtin for SGLang's own worker and layers",
        )
    elif on_cpu:
        raise DFlashError(
            f"{reason}, on the CPU platform",
            expected="a DFlash or DFlash2 drafter without this option",
            remedy="run this pair on a GPU, where SGLang's own worker supports it",
        )
    return reason


def _not_ours(settings: Settings, pair: Pair, machine: Device) -> str | None:
    if pair.kind:
        return f"the drafter type is {pair.kind}"
    if reason := left_untouched(settings, pair, machine):
        return reason
    if machine.kind == "gpu" and not (settings.device or "cuda").startswith("cuda"):
        return f"the device is {settings.device}"
    if settings.attn_cp_size > 1 and settings.groups == 1:
        return "context parallelism is used"
    if settings.enable_watermark:
        return "--enable-watermark is used"
    if settings.speculative_accept_threshold_single != 1.0:
        return "--speculative-accept-threshold-single is not lossless"
    if settings.speculative_accept_threshold_acc != 1.0:
        return "--speculative-accept-threshold-acc is not lossless"
    return None


def _check_dp_attention(settings: Settings, pair: Pair, on_cpu: bool) -> None:
    # on GPUs too: SGLang's worker would serve silently, with an eager drafter and one width
    groups, family = settings.groups, str(pair.text.get("model_type"))
    tied = pair.target.get("tie_word_embeddings", pair.text.get("tie_word_embeddings"))
    for refused, found, expected, remedy in (
        (
            not settings.enable_dp_lm_head,
            "one LM head for all ranks",
            "a whole LM head per group: the drafter predicts with the target's, at times when no other group does",
            "add --enable-dp-lm-head",
        ),
        (settings.attn_cp_size > 1, "context parallelism", "--attn-cp-size 1", "leave --attn-cp-size out"),
        (
            settings.skip_gather.lower() in ("1", "true", "t", "yes", "y", "on"),
            f"{SKIP_GATHER}={settings.skip_gather}",
            "the scheduler's gathering before each step, with which all ranks agree on a block width",
            f"unset {SKIP_GATHER}",
        ),
        (
            settings.disaggregation_mode != "null",
            f"--disaggregation-mode {settings.disaggregation_mode}",
            "prefill and decoding in one server",
            "use --tp-size without DP attention in a disaggregated pair",
        ),
        (
            family not in LOCAL_EMBEDDING,
            f"a target of the type {family}, whose embedding all ranks divide",
            f"an embedding per group, as in {', '.join(sorted(LOCAL_EMBEDDING))}",
            "use --tp-size without DP attention",
        ),
        (
            settings.sharing > 1 and tied and family.startswith("qwen3_5"),
            f"{settings.sharing} ranks per group, and a tied LM head that SGLang does not divide",
            "one rank per group, or a target with a separate LM head",
            f"set --attn-dp-size {settings.tp_size}",
        ),
    ):
        if refused:
            builtin = "" if on_cpu else f", or set {SWITCH}=builtin to try SGLang's own worker"
            found = f"DP attention over {groups} groups of ranks with {found}"
            raise DFlashError(found, expected=expected, remedy=remedy + builtin)


def _refuse_megakernel(settings: Settings) -> None:
    if settings.enable_nvidia_megakernel:
        raise DFlashError(
            "--enable-nvidia-megakernel replaces the forward pass of decode and verify steps",
            expected="the target's own forward pass, which this package captures in CUDA graphs",
            remedy=f"{SWITCH}=builtin for SGLang's own worker, or leave --enable-nvidia-megakernel out",
        )


def decide(settings: Settings, pair: Pair, machine: Device, *, hybrid: bool) -> ServingPlan:
    """Make the plan for a pair that our worker serves.

    Raises:
        DFlashError: the arguments set widths, copies or a state replay that cannot be served.
    """
    block, drafter = pair.block_size(settings), pair.drafter
    _check_widths(settings, pair, block)
    kept_by = settings.states_kept_by if hybrid else None
    replay = hybrid and kept_by is None
    copies = chooses_copies(settings, pair.widths) and settings.disaggregation_mode != "prefill"
    if not (copies or pair.has_drafter):
        raise DFlashError(
            "nothing drafts: there is no drafter, and blocks are not copied",
            expected="a drafter, copies, or both",
            remedy=f'set --speculative-draft-model-path, or leave {COPIES_SWITCH} and "copies" of {FLAG} out',
        )
    window = context_window(settings.speculative_draft_window_size, drafter)
    requested = settings.enable_deterministic_inference and settings.exact_switch != "0"
    against = reasons_against_exact(settings, pair, machine, replay=replay) if requested else ()
    return ServingPlan(
        files=pair.drafter_files,
        drafter=drafter,
        block=block,
        widths=pair.widths,
        window=None if window is None else DraftWindow(window, block, settings.page),
        hybrid=hybrid,
        replay=replay,
        kept_by=kept_by,
        records=settings.record_length(block) if replay else 0,
        copies=copies,
        overlap=not settings.disable_overlap_schedule and not (hybrid and _resumes_retracted(settings)),
        role=cast(Role, settings.disaggregation_mode),
        groups=settings.groups,
        exact=requested and not against,
        inexact=against,
        overrides=settings.drafter_overrides,
    )


def _check_widths(settings: Settings, pair: Pair, block: int) -> None:
    if pair.widths is not None:
        pair.widths.widths_for(block, pair.drafter.block_size)
    elif settings.speculative_adaptive_config is not None:
        raise DFlashError(
            f"{FLAG} {settings.speculative_adaptive_config} without --speculative-adaptive",
            expected="both, or neither",
            remedy="add --speculative-adaptive, or leave the file out",
        )


def chooses_copies(settings: Settings, widths: WidthConfig | None) -> bool:
    """By the switch or the width file, otherwise with adaptive widths."""
    switch, key = settings.copies_switch, None if widths is None else widths.copies
    if switch and key not in (None, switch == "1"):
        raise DFlashError(
            f'{COPIES_SWITCH}={switch} and "copies": {str(key).lower()} in the file of {FLAG}',
            expected="one of them",
            remedy=f"unset {COPIES_SWITCH}",
        )
    if switch or key is not None:
        return switch == "1" or bool(key)
    return widths is not None and widths.policy == "adaptive"


def _resumes_retracted(settings: Settings) -> bool:
    # at a retraction SGLang drops the step in flight but keeps the recurrent state that it has advanced
    return settings.disaggregation_mode == "decode" and settings.disaggregation_decode_retraction_backup != "none"


def reasons_against_exact(settings: Settings, pair: Pair, machine: Device, *, replay: bool) -> tuple[str, ...]:
    """Return the reasons why a verify is not bit-identical to plain decoding; empty if it is.

    This package computes attention and the gated delta rule as SGLang's Triton kernels do in plain decoding;
    deterministic inference covers the rest.
    """
    return tuple(_reasons(settings, pair, machine, replay))


def _reasons(settings: Settings, pair: Pair, machine: Device, replay: bool) -> Iterator[str]:
    text, dtype = pair.text, pair.served_dtype(settings)
    if dtype != "bfloat16":
        yield f"the dtype is {dtype}, not bfloat16"
    if replay and settings.conv_dtype_variable not in ("", dtype):
        yield f"replayed records are in {settings.conv_dtype_variable}"
    if machine.kind != "cpu":  # the CPU platform has one implementation of each
        yield from _backends(settings, pair)
    if (scheme := settings.quantization or pair.quantisation_method) not in (None, "unquant"):
        yield f"the weights are quantised ({scheme})"
    if settings.kv_cache_dtype not in ("auto", "bf16", "bfloat16"):
        yield f"K/V are stored in {settings.kv_cache_dtype}"
    if settings.enable_mixed_chunk:
        yield "--enable-mixed-chunk decodes rows in a prefill"
    if "sliding_attention" in (text.get("layer_types") or ()) or text.get("use_sliding_window"):
        yield "the target has sliding-window layers"
    if text.get("kv_lora_rank") is not None:
        yield "the target has MLA layers"
    if settings.enable_lora:
        yield "LoRA adapters are served"
    if settings.tp_size > 1:
        yield f"--tp-size {settings.tp_size} sums over ranks"


def _backends(settings: Settings, pair: Pair) -> Iterator[str]:
    chosen = settings.attention_backend, settings.prefill_attention_backend, settings.decode_attention_backend
    attention = {name for name in chosen if name} or {"SGLang's choice"}
    if attention != {"triton"}:
        yield f"the attention backend is {', '.join(sorted(attention))}, not triton (--attention-backend triton)"
    if pair.hybrid:
        linear = settings.linear_attn_prefill_backend, settings.linear_attn_verify_backend, settings.decode_backend
        if others := {name for name in linear if name} - {"triton"}:
            yield f"the linear-attention backend is {', '.join(sorted(others))}, not triton"
        if settings.enable_linear_replayssm:
            yield "--enable-linear-replayssm decodes with another kernel"
    experts = any(pair.text.get(name) for name in ("num_experts", "n_routed_experts", "num_local_experts"))
    if experts and settings.moe_runner_backend != "triton":
        runner = settings.moe_runner_backend
        yield f"the MoE runner is {runner}, not triton (--moe-runner-backend triton)"
    if settings.bf16_gemm_backend == "gemv":
        yield "--bf16-gemm-backend gemv multiplies single rows with another kernel"
