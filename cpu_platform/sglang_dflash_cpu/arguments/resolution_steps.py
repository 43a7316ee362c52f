"""Our part in SGLang's resolution of server arguments on a CPU: refuse, map, default, and say so in the log.

Two of SGLang's overridable resolution steps are wrapped: the runtime validation, which runs before the model's path is
resolved, and the CPU back-end choice, which for SGLang's own CPU engine picks Intel AMX kernels.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import psutil

from sglang_dflash.plan.sizes import state_bytes, target_kv_per_token
from sglang_dflash_cpu.arguments.gpu_flags import cpu_values
from sglang_dflash_cpu.arguments.refusals import check_before_model, check_drafter, check_target
from sglang_dflash_cpu.arguments.threads import environment_defaults

MAX_RUNNING_REQUESTS = 32
TOKENS_PER_REQUEST = 8192
STATES_PER_REQUEST = 8  # working state, two tracked snapshots, and as many again in the prefix cache
SMALL_PART = 0.1  # of the memory that is available


logger = logging.getLogger(__name__)

_SOURCE = "sglang_dflash_cpu"
# What every architecture has, though its checkpoint may name it otherwise (GPT-2's n_layer).
_SHAPE = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
Step = Callable[[Any], None]


def validate_runtime(server_args: Any, previous: Step) -> None:
    """Wraps ``handle_hardware_runtime_validation``: what can be refused before the model's config is read."""
    from sglang_dflash.upstream import ATTENTION_BACKEND_CHOICES, resolving_view

    previous(server_args)
    check_before_model(resolving_view(server_args), list(ATTENTION_BACKEND_CHOICES))


def choose_backends(server_args: Any, previous: Step) -> None:
    """Replaces ``handle_cpu_backends`` (``previous`` is not called: it would pick kernels that are not installed)."""
    from sglang_dflash.upstream import declare_resolution, model_config_of, resolving_view

    del previous
    cfg = resolving_view(server_args)
    model_config = model_config_of(server_args)
    check_target(model_config, cfg)
    check_drafter(cfg)

    changes, warnings = cpu_values(lambda field: getattr(cfg, field))
    for line in warnings:
        logger.warning("CPU platform: %s", line)
    changes["cuda_graph_config"] = _no_graphs(server_args, cfg)
    defaults = _defaults(cfg, model_config)
    declare_resolution(server_args, _SOURCE, **changes, **defaults)

    ranks = cfg.tp_size * cfg.pp_size * cfg.dp_size
    environment = environment_defaults(ranks, conv_dtype=str(model_config.dtype).removeprefix("torch."))
    os.environ.update(environment)
    settings = {**defaults, **environment}
    logger.info("CPU platform defaults: %s", ", ".join(f"{k}={v}" for k, v in settings.items()) or "none")


def _no_graphs(server_args: Any, cfg: Any) -> Any:
    """``cuda_graph_config`` with both phases off; one warning if the command line asked for graphs."""
    from sglang_dflash.upstream import Backend, Phase, with_phase

    config = cfg.cuda_graph_config
    asked = getattr(server_args, "_cuda_graph_config_locked", ())
    if any(key != "backend" or getattr(config, phase).backend != Backend.DISABLED for phase, key in asked):
        logger.warning("CPU platform: CUDA-graph flags need a GPU: every forward runs eagerly on this CPU")
    for phase in (Phase.DECODE, Phase.PREFILL):
        config = with_phase(config, phase, backend=Backend.DISABLED)
    return config


def _defaults(cfg: Any, model_config: Any) -> dict[str, Any]:
    """Sizes that the user left open (running requests, KV tokens, recurrent states), and a scheduler that sleeps.

    An idle scheduler polls its sockets without a pause, which on a CPU takes a core from the rest of the machine. A
    decoding server (prefill/decode disaggregation) keeps retracted requests as plain tensors: SGLang's other way needs
    pinned memory and kernels.
    """
    running = cfg.max_running_requests or MAX_RUNNING_REQUESTS
    caps = pool_defaults(
        model_config.hf_text_config.to_dict() | {name: getattr(model_config, name) for name in _SHAPE},
        dtype_bytes=model_config.dtype.itemsize,
        running=running,
        context=model_config.context_len,
        available=psutil.virtual_memory().available,
    )
    left_open = {"max_running_requests": running, **caps}
    if cfg.disaggregation_mode == "decode":
        left_open["disaggregation_decode_retraction_backup"] = "cpu_tensor"
    return {"sleep_on_idle": True} | {name: value for name, value in left_open.items() if getattr(cfg, name) is None}


def pool_defaults(
    config: Mapping[str, Any], *, dtype_bytes: int, running: int, context: int, available: int
) -> dict[str, int]:
    """Cap ``max_total_tokens`` and ``max_mamba_cache_size``, for a user who chose neither.

    SGLang sizes its pools to fill a fraction of the device's memory, which on a CPU is the machine's: a tiny model
    would zero gigabytes at start. So both pools are capped at what the requests that may run can use, where that is a
    small part of the memory; a larger model keeps SGLang's sizing.

    Args:
        config: the target's text config as SGLang or the checkpoint has it; SGLang's drops ``layer_types`` of hybrids
            and keeps ``full_attention_interval``.
        dtype_bytes: bytes of one element of K, V and the convolution state; the recurrent state is float32.
        running: requests that may run at once.
        context: longest sequence the model takes, tokens.
        available: free memory of the machine, bytes.
    """
    tokens, states = running * min(context, TOKENS_PER_REQUEST), running * STATES_PER_REQUEST
    token_bytes = target_kv_per_token(config, kv_bytes=dtype_bytes, tp_size=1)
    state = state_bytes(config, recurrent_bytes=4, conv_bytes=dtype_bytes, tp_size=1).slot
    defaults = {}
    if tokens * token_bytes <= available * SMALL_PART:
        defaults["max_total_tokens"] = tokens
    if 0 < states * state <= available * SMALL_PART:  # 0 without recurrent layers
        defaults["max_mamba_cache_size"] = states
    return defaults


def install() -> None:
    """Register both steps. SGLang runs a step as often as it is registered: call this once a process."""
    from sglang_dflash.upstream import register_resolution_hook

    register_resolution_hook("handle_hardware_runtime_validation")(validate_runtime)
    register_resolution_hook("handle_cpu_backends")(choose_backends)
