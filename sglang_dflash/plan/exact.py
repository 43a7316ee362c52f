"""Exact mode: whether a verify computes plain decoding's numbers bit by bit, and every reason against it.

``--enable-deterministic-inference`` makes SGLang's operations independent of the rows next to them. Two then still
separate a verify from plain decoding: attention and the gated delta rule. This package computes both as plain decoding
does (``hooks/decode_rows.py``, ``states/stepped.py``) where plain decoding is known to run SGLang's Triton kernels.
"""

from __future__ import annotations

from collections.abc import Iterator

from sglang_dflash.drafter.config import quantization
from sglang_dflash.errors import Finding, ok, warn
from sglang_dflash.plan.device import Device
from sglang_dflash.plan.pair import Pair
from sglang_dflash.plan.serving import ServingPlan
from sglang_dflash.plan.settings import DETERMINISTIC_FLAG, EXACT_SWITCH, Settings


def is_requested(settings: Settings) -> bool:
    return settings.enable_deterministic_inference and settings.exact_switch != "0"


def reasons_against(settings: Settings, pair: Pair, machine: Device, *, replay: bool) -> tuple[str, ...]:
    """Return every reason why a verify is not exact; empty if there is none."""
    return tuple(_reasons(settings, pair, machine, replay))


def _reasons(settings: Settings, pair: Pair, machine: Device, replay: bool) -> Iterator[str]:
    text, dtype = pair.text, pair.served_dtype(settings)
    if dtype != "bfloat16":
        yield f"the dtype is {dtype}, not bfloat16"
    if replay and settings.conv_dtype_variable not in ("", dtype):
        yield f"replayed records are in {settings.conv_dtype_variable}"
    if machine.kind != "cpu":  # the CPU platform has one implementation of each
        yield from _backends(settings, pair)
    if (scheme := settings.quantization or quantization(pair.target)) not in (None, "unquant"):
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


def check_exact(plan: ServingPlan) -> Finding:
    """Return what is exact, or every reason against it."""
    if plan.exact:
        return ok("greedy text is plain decoding's, bit by bit")
    return warn(
        f"a verify is not exact under {DETERMINISTIC_FLAG}: {'; '.join(plan.inexact)}",
        expected="plain decoding through SGLang's Triton kernels, in bfloat16 on one GPU",
        remedy=f"change what is named, or set {EXACT_SWITCH}=0 to accept text that may differ at near-ties",
    )
