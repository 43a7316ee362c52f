"""State replay: its two operations, and the hooks that make SGLang allocate its pool and call its verify.

SGLang refuses ``--enable-linear-replayssm-spec`` for DFLASH on GDN targets, because its DFLASH worker does not commit a
replay. This worker does (:mod:`.commit`). SGLang's records are rings with cursors. Here every commit folds the records
into the state, so a block's records begin at position 0 at any width, and no cursor is read or moved.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

from sglang_dflash.ops import by_device
from sglang_dflash.plan import serving
from sglang_dflash.states import reference
from sglang_dflash.states.reference import Records
from sglang_dflash.upstream import get_exec, get_schedule, get_spec

gdn_verify = by_device(reference.gdn_verify, "sglang_dflash.states.gdn_verify")
gdn_commit = by_device(reference.gdn_commit, "sglang_dflash.states.gdn_commit")

_INPUTS = "k", "v", "a", "b", "A_log", "dt_bias", "scale", "out"
_RINGS = "d", "k", "g", "rawv", "rawk"  # SGLang's names, in the order of Records


def verify(original: Callable[..., Any], **call: Any) -> Any:
    """Hook around ``gdn_replayssm_spec_decode``, which SGLang calls per GDN layer, with keywords only."""
    if serving.plan is None:
        return original(**call)
    mamba = get_exec().mamba
    # As in plain decoding: Triton's decode kernel rounds beta to the dtype of its input, FlashInfer's keeps fp32.
    backend = mamba.linear_attn_decode_backend or mamba.linear_attn_backend
    return gdn_verify(
        call["q"],
        **{name: call[name] for name in _INPUTS},
        states=call["checkpoint_state"],
        slots=call["ssm_state_indices"],
        records=Records(*(call[f"{ring}_cache"] for ring in _RINGS)),
        rows=call["replay_indices"],
        width=call["max_spec_len"],
        round_beta=backend == "triton",
    )


def pool_records(states: Any) -> Records:
    """Return the records of all layers in SGLang's ``SpeculativeState``."""
    return Records(*(getattr(states, f"replayssm_{ring}") for ring in _RINGS))


def build_pool(original: Callable[..., Any], configurator: Any, **sizes: Any) -> Any:
    """Hook around ``KVCacheConfigurator._build_hybrid_req_pool``, which allows a replay for KDA models only."""
    # The method reads hybrid_kda_config for this check only.
    if serving.plan is not None and configurator.hybrid_kda_config is None:
        configurator = copy.copy(configurator)
        configurator.hybrid_kda_config = configurator.hybrid_gdn_config
    return original(configurator, **sizes)


def charge_windows(original: Callable[..., Any], configurator: Any, total_rest_memory: float) -> Any:
    """Hook around ``KVCacheConfigurator._handle_max_mamba_cache``, which omits a replay's convolution windows."""
    # total_rest_memory: GiB for recurrent states and K/V
    if serving.plan is not None and get_exec().mamba.enable_linear_replayssm_spec:
        params = configurator.mambaish_config.mamba2_cache_params
        block = get_spec().speculative_num_draft_tokens
        window = sum(math.prod(shape) // min(shape) * (min(shape) + block - 1) for shape in params.shape.conv)
        rows = get_schedule().max_running_requests + 1
        total_rest_memory -= rows * window * params.dtype.conv.itemsize * len(params.layers) / (1 << 30)
    return original(configurator, total_rest_memory)
