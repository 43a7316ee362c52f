"""Exact mode: a verify that is bit-identical to plain decoding, and what rules it out.

This package computes attention and the gated delta rule as SGLang's Triton kernels do in plain decoding; deterministic
inference covers the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sglang_dflash.errors import Finding, ok, warn
from sglang_dflash.plan.device import Device
from sglang_dflash.plan.pair import Pair
from sglang_dflash.plan.settings import DETERMINISTIC_FLAG, EXACT_SWITCH, Settings
from sglang_dflash.plan.states import CONV_DTYPE

if TYPE_CHECKING:
    from sglang_dflash.plan.serving import ServingPlan


def is_requested(settings: Settings) -> bool:
    return settings.enable_deterministic_inference and settings.variable(EXACT_SWITCH) != "0"


def reasons_against_exact(settings: Settings, pair: Pair, device: Device, *, replay: bool) -> Iterator[str]:
    """Yield the reasons why a verify is not bit-identical to plain decoding; nothing if it is."""
    text, dtype, records = pair.text, pair.served_dtype(settings), settings.variable(CONV_DTYPE)
    if dtype != "bfloat16":
        yield f"the dtype is {dtype}, not bfloat16"
    if replay and records not in ("", dtype):
        yield f"replayed records are in {records}"
    if device.kind != "cpu":  # the CPU platform has one implementation of each
        yield from _other_kernels(settings, pair)
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


def _other_kernels(settings: Settings, pair: Pair) -> Iterator[str]:
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
        yield f"the MoE runner is {settings.moe_runner_backend}, not triton (--moe-runner-backend triton)"
    if settings.bf16_gemm_backend == "gemv":
        yield "--bf16-gemm-backend gemv multiplies single rows with another kernel"


def check_exact(plan: ServingPlan) -> Iterator[Finding]:
    if plan.exact:
        yield ok("greedy output is bit-identical to plain decoding", about="exact")
    if plan.inexact:
        yield warn(
            f"a verify is not exact under {DETERMINISTIC_FLAG}: {'; '.join(plan.inexact)}",
            expected="plain decoding through SGLang's Triton kernels, in bfloat16 on one GPU",
            remedy=f"change what is named, or set {EXACT_SWITCH}=0 to accept text that may differ at near-ties",
            about="exact",
        )
