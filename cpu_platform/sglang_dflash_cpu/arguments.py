"""Server arguments on a CPU: refuse what is not supported, map GPU-only choices, set and log defaults."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from sglang_dflash.drafter.quantisation import quantization
from sglang_dflash.errors import DFlashError
from sglang_dflash.launch.sizes import state_bytes, target_kv_per_token
from sglang_dflash_cpu.layers import ATTENTION_BACKEND
from sglang_dflash_cpu.threads import environment_defaults

logger = logging.getLogger(__name__)

Step = Callable[[Any], None]
Rule = tuple[bool, str, str]  # whether to refuse, problem, remedy

MAX_RUNNING_REQUESTS = 32
TOKENS_PER_REQUEST = 8192
STATES_PER_REQUEST = 8  # the working state, two tracked snapshots, as many again in the prefix cache
SMALL_PART = 0.1  # of the machine's memory

_ATTENTION_FIELDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
_KV_DTYPES = ("auto", "bfloat16", "bf16", "float16", "float32")
_PLAIN = (None, "unquant")
_GPU = "serve it on a GPU, where this platform stays inactive"
# Checkpoints may use other names (GPT-2's n_layer).
_SHAPE = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")

_TORCH_ATTENTION, _TORCH_GDN, _GLOO = "torch attention", "the CPU platform's torch kernels", "gloo"


class Choice(NamedTuple):
    field: str
    instead: Any  # replaces values that a CPU does not support
    served_by: str  # for the warning
    allowed: tuple[Any, ...] = ()  # other values that pass through


CHOICES = (
    Choice("attention_backend", ATTENTION_BACKEND, _TORCH_ATTENTION),
    Choice("prefill_attention_backend", None, _TORCH_ATTENTION),
    Choice("decode_attention_backend", None, _TORCH_ATTENTION),
    Choice("speculative_draft_attention_backend", ATTENTION_BACKEND, _TORCH_ATTENTION, (None,)),
    # "triton" selects the functions that the platform replaces.
    Choice("linear_attn_backend", "triton", _TORCH_GDN),
    Choice("linear_attn_prefill_backend", "triton", _TORCH_GDN, (None,)),
    Choice("linear_attn_decode_backend", "triton", _TORCH_GDN, (None,)),
    Choice("linear_attn_verify_backend", "triton", _TORCH_GDN, (None,)),
    Choice("mamba_backend", "triton", _TORCH_GDN, (None,)),
    Choice("enable_linear_replayssm", False, _TORCH_GDN),
    Choice("sampling_backend", "pytorch", "torch"),
    Choice("moe_runner_backend", "auto", "torch experts", ("triton",)),
    Choice("moe_a2a_backend", "none", _GLOO, (None,)),
    Choice("bf16_gemm_backend", "torch", "torch", ("auto",)),
    Choice("flashinfer_allreduce_fusion_backend", None, _GLOO),
    Choice("enable_flashinfer_allreduce_fusion", False, _GLOO),
    Choice("enable_aiter_allreduce_fusion", False, _GLOO),
    Choice("enable_mscclpp", False, _GLOO),
    Choice("enable_nccl_nvls", False, _GLOO),
    Choice("enable_symm_mem", False, _GLOO),
    Choice("enable_torch_symm_mem", False, _GLOO),
    Choice("enable_torch_compile", False, "eager torch"),
)


def install() -> None:
    """Register both steps, once per process."""
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    register_resolution_hook("handle_hardware_runtime_validation")(validate_runtime)
    register_resolution_hook("handle_cpu_backends")(choose_backends)
    register_resolution_hook("handle_model_specific_adjustments")(adjust_model)


def validate_runtime(server_args: Any, previous: Step) -> None:
    """Wrap ``handle_hardware_runtime_validation``: refuse what needs no model config."""
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
    from sglang.srt.arg_groups.overrides import resolving_view

    previous(server_args)
    check_before_model(resolving_view(server_args), list(ATTENTION_BACKEND_CHOICES))


def choose_backends(server_args: Any, previous: Step) -> None:
    """Replace ``handle_cpu_backends``, which selects kernels that are not installed."""
    from sglang.srt.arg_groups.overrides import declare_resolution, model_config_of, resolving_view

    del previous
    cfg = resolving_view(server_args)
    model_config = model_config_of(server_args)
    check_pair(model_config, cfg)

    changes, warnings = cpu_values(lambda field: getattr(cfg, field))
    for line in warnings:
        logger.warning("CPU platform: %s", line)
    if cfg.enable_lora or cfg.lora_paths:
        changes["lora_backend"] = "torch_native"
    changes["cuda_graph_config"] = _without_graphs(server_args, cfg)
    defaults = _defaults(cfg, model_config)
    declare_resolution(server_args, "sglang_dflash_cpu", **changes, **defaults)

    ranks = cfg.tp_size * cfg.pp_size * cfg.dp_size
    environment = environment_defaults(ranks, conv_dtype=str(model_config.dtype).removeprefix("torch."))
    os.environ.update(environment)
    settings = {**defaults, **environment}
    logger.info("CPU platform defaults: %s", ", ".join(f"{k}={v}" for k, v in settings.items()) or "none")


def adjust_model(server_args: Any, previous: Step) -> None:
    """Wrap ``handle_model_specific_adjustments``: some models list the attention backends that they accept."""
    from sglang.srt.arg_groups import model_hook

    def as_triton(cfg: Any) -> tuple[str, ...]:
        return tuple("triton" if backend == ATTENTION_BACKEND else backend for backend in backends_of(cfg))

    backends_of, model_hook.attention_backends_of = model_hook.attention_backends_of, as_triton
    try:
        previous(server_args)
    finally:
        model_hook.attention_backends_of = backends_of


def check_before_model(cfg: Any, known: list[str]) -> None:
    """Refuse a missing model folder and an unknown attention backend."""
    backends = [(field, getattr(cfg, field)) for field in _ATTENTION_FIELDS]
    _refuse(
        *(
            (
                backend not in (None, *known),
                f"{field}={backend!r} is none of {', '.join(sorted(known))}",
                f"leave it out: the CPU platform serves every model with {ATTENTION_BACKEND}",
            )
            for field, backend in backends
        ),
        (
            _is_missing_folder(cfg.model_path),
            f"--model-path {cfg.model_path} does not exist",
            "check the path; `sglang-dflash pairs path tiny-hybrid` prints the path of a small model",
        ),
    )


def check_pair(model_config: Any, cfg: Any) -> None:
    from sglang.srt.configs.hybrid_arch import hybrid_gdn_config, mambaish_config
    from sglang.srt.configs.model_config import AttentionArch

    name = ", ".join(model_config.hf_config.architectures or ["unnamed"])
    attention = model_config.attention_arch
    is_other = attention not in (AttentionArch.MHA, AttentionArch.MLA)
    other_recurrence = mambaish_config(model_config) is not None and hybrid_gdn_config(model_config) is None
    scheme = cfg.quantization or quantization(model_config.hf_config.to_dict())
    _refuse(
        (is_other, f"{name} uses {attention.name} attention", _GPU),
        (other_recurrence, f"{name} has recurrent layers other than gated-delta-net", _GPU),
        (model_config.is_encoder_decoder, f"{name} is an encoder-decoder model", _GPU),
        (
            scheme not in _PLAIN,
            f"{name} with {scheme} quantisation on a CPU is not supported",
            "use the checkpoint's unquantised version here, or " + _GPU,
        ),
        (
            cfg.kv_cache_dtype not in _KV_DTYPES,
            f"--kv-cache-dtype {cfg.kv_cache_dtype} on a CPU is none of {', '.join(_KV_DTYPES)}",
            "leave it out: the KV cache then has the model's dtype",
        ),
    )


def _is_missing_folder(model_path: str) -> bool:
    looks_local = model_path.startswith(("/", "./", "../", "~")) or model_path.count("/") > 1
    return looks_local and "://" not in model_path and not Path(model_path).expanduser().exists()


def _refuse(*rules: Rule) -> None:
    for refused, problem, remedy in rules:
        if refused:
            raise DFlashError(problem, remedy)


def cpu_values(value_of: Callable[[str], Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the server arguments to change, and a warning for each one that the user set."""
    changes, warnings = {}, []
    for field, instead, served_by, allowed in CHOICES:
        value = value_of(field)
        if value == instead or value in allowed:
            continue
        changes[field] = instead
        if value is not None:
            flag = "--" + field.replace("_", "-")
            found = flag if value is True else f"{flag} {value}"
            warnings.append(f"{found} needs a GPU: served by {served_by} on this CPU")
    return changes, warnings


def _without_graphs(server_args: Any, cfg: Any) -> Any:
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

    config = cfg.cuda_graph_config
    set_by_user = getattr(server_args, "_cuda_graph_config_locked", ())
    if any(key != "backend" or getattr(config, phase).backend != Backend.DISABLED for phase, key in set_by_user):
        logger.warning("CPU platform: CUDA-graph flags need a GPU: every forward runs eagerly on this CPU")
    for phase in (Phase.DECODE, Phase.PREFILL):
        config = with_phase(config, phase, backend=Backend.DISABLED)
    return config


def _defaults(cfg: Any, model_config: Any) -> dict[str, Any]:
    running = cfg.max_running_requests or MAX_RUNNING_REQUESTS
    caps = pool_defaults(
        model_config.hf_text_config.to_dict() | {name: getattr(model_config, name) for name in _SHAPE},
        dtype_bytes=model_config.dtype.itemsize,
        running=running,
        context=model_config.context_len,
        memory=psutil.virtual_memory().total,
    )
    left_open = {"max_running_requests": running, **caps}
    if cfg.disaggregation_mode == "decode":
        # Retraction in pinned memory needs an accelerator.
        left_open["disaggregation_decode_retraction_backup"] = "cpu_tensor"
    # An idle scheduler polls its sockets and occupies a core.
    return {"sleep_on_idle": True} | {name: value for name, value in left_open.items() if getattr(cfg, name) is None}


def pool_defaults(
    config: Mapping[str, Any], *, dtype_bytes: int, running: int, context: int, memory: int
) -> dict[str, int]:
    """Return caps for ``max_total_tokens`` and ``max_mamba_cache_size`` if the user set neither.

    SGLang would zero a fraction of the machine's memory at start. A cap holds what the running requests can use.

    Args:
        config: the target's text config; SGLang's hybrids have ``full_attention_interval`` instead of ``layer_types``.
        dtype_bytes: bytes per element of K, V and the convolution state; the recurrent state is float32.
        running, context: maximum requests, and tokens per request.
        memory: of the machine, bytes.
    """
    tokens, states = running * min(context, TOKENS_PER_REQUEST), running * STATES_PER_REQUEST
    token_bytes = sum(target_kv_per_token(config, kv_bytes=dtype_bytes, tp_size=1))
    state = sum(state_bytes(config, recurrent_bytes=4, conv_bytes=dtype_bytes, tp_size=1)[:2])
    defaults = {}
    if tokens * token_bytes <= memory * SMALL_PART:
        defaults["max_total_tokens"] = tokens
    if 0 < states * state <= memory * SMALL_PART:  # 0 without recurrent layers
        defaults["max_mamba_cache_size"] = states
    return defaults
