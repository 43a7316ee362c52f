"""Exact mode: a verify that is bit-identical to plain decoding, and the reasons against it.

This package computes attention and the gated delta rule as SGLang's Triton kernels do in plain decoding; deterministic
inference covers the rest.
"""

from collections.abc import Iterator

from sglang_dflash.errors import Finding, ok, warn
from sglang_dflash.launch.launch import Launch
from sglang_dflash.launch.settings import DETERMINISTIC_FLAG, EXACT_SWITCH
from sglang_dflash.launch.states import CONV_DTYPE, replays


def check_exact(launch: Launch) -> Iterator[Finding]:
    if not is_requested(launch):
        return
    if reasons := reasons_against_exact(launch):
        yield warn(
            f"a verify is not exact under {DETERMINISTIC_FLAG}: {'; '.join(reasons)}",
            remedy=f"change what is named, or set {EXACT_SWITCH}=0 to accept text that may differ at near-ties",
        )
    yield ok("greedy output is bit-identical to plain decoding")


def is_requested(launch: Launch) -> bool:
    return launch.settings.enable_deterministic_inference and launch.settings.variable(EXACT_SWITCH) != "0"


def reasons_against_exact(launch: Launch) -> tuple[str, ...]:
    """Return the reasons why a verify is not bit-identical to plain decoding; empty if it is."""
    settings, text, dtype = launch.settings, launch.text, launch.dtype
    records, scheme = settings.variable(CONV_DTYPE), settings.quantization or launch.quantisation_method
    slides = "sliding_attention" in (text.get("layer_types") or ()) or text.get("use_sliding_window")
    reasons = {
        f"the dtype is {dtype}, not bfloat16": dtype != "bfloat16",
        f"replayed records are in {records}": records not in ("", dtype) and replays(launch),
        **({} if launch.device.kind == "cpu" else _other_kernels(launch)),  # the CPU platform has one of each
        f"the weights are quantised ({scheme})": scheme not in (None, "unquant"),
        f"K/V are stored in {settings.kv_cache_dtype}": settings.kv_cache_dtype not in ("auto", "bf16", "bfloat16"),
        "--enable-mixed-chunk decodes rows in a prefill": settings.enable_mixed_chunk,
        "the target has sliding-window layers": slides,
        "the target has MLA layers": text.get("kv_lora_rank") is not None,
        "LoRA adapters are served": settings.enable_lora,
        f"--tp-size {settings.tp_size} sums over ranks": settings.tp_size > 1,
    }
    return tuple(reason for reason, applies in reasons.items() if applies)


def _other_kernels(launch: Launch) -> dict[str, object]:
    settings, hybrid, runner = launch.settings, launch.hybrid, launch.settings.moe_runner_backend
    chosen = settings.attention_backend, settings.prefill_attention_backend, settings.decode_attention_backend
    attention = ", ".join(sorted({name for name in chosen if name})) or "SGLang's choice"
    of_states = settings.linear_attn_prefill_backend, settings.linear_attn_verify_backend, settings.decode_backend
    linear = ", ".join(sorted({name for name in of_states if name} - {"triton"}))
    experts = any(launch.text.get(name) for name in ("num_experts", "n_routed_experts", "num_local_experts"))
    return {
        f"the attention backend is {attention}, not triton (--attention-backend triton)": attention != "triton",
        f"the linear-attention backend is {linear}, not triton": hybrid and linear,
        "--enable-linear-replayssm decodes with another kernel": hybrid and settings.enable_linear_replayssm,
        f"the MoE runner is {runner}, not triton (--moe-runner-backend triton)": experts and runner != "triton",
        "--bf16-gemm-backend gemv multiplies single rows with another kernel": settings.bf16_gemm_backend == "gemv",
    }
