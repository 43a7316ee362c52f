"""State replay: its two operations, and the hooks that make SGLang allocate its pool and call our verify.

Every commit folds SGLang's ring of records into the state, so a block's records begin at position 0.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from sglang_dflash.ops import by_device, runs_kernels
from sglang_dflash.plan import serving
from sglang_dflash.states import reference, stepped
from sglang_dflash.states.reference import Records
from sglang_dflash.upstream.worker import get_exec

gdn_verify = by_device(reference.gdn_verify, "sglang_dflash.states.kernels")
gdn_commit = by_device(reference.gdn_commit, "sglang_dflash.states.kernels")

_INPUTS = "k", "v", "a", "b", "A_log", "dt_bias", "scale", "out"
_RINGS = "d", "k", "g", "rawv", "rawk"  # SGLang's names, in the order of Records


def verify(original: Callable[..., Any], **call: Any) -> Any:
    """Hook around ``gdn_replayssm_spec_decode``, which SGLang calls per GDN layer, with keywords only."""
    if serving.plan is None:
        return original(**call)
    slots, rows, width = call["ssm_state_indices"], call["replay_indices"], call["max_spec_len"]
    inputs = {name: call[name] for name in _INPUTS} | {"states": call["checkpoint_state"], "slots": slots}
    records = Records(*(call[f"{ring}_cache"] for ring in _RINGS))
    if serving.plan.exact:
        live_rows = torch.where(slots >= 0, rows, 0).long()
        stepped.record(records, live_rows, *(call[name] for name in ("k", "v", "a", "b")), width=width)
        return stepped.step_verify(call["q"], **inputs, width=width)
    round_beta = decode_rounds_beta()
    return gdn_verify(call["q"], **inputs, records=records, rows=rows, width=width, round_beta=round_beta)


def decode_rounds_beta() -> bool:
    """Return whether plain decoding rounds beta to its input's dtype: Triton's kernel does, FlashInfer's does not."""
    mamba = get_exec().mamba
    return (mamba.linear_attn_decode_backend or mamba.linear_attn_backend) == "triton"


def verify_kept(original: Callable[..., Any], kernel: Any, **call: Any) -> Any:
    """Hook around ``TritonGDNKernel.target_verify``, which stores a state per token: use plain decoding's beta."""
    if serving.plan is None or not decode_rounds_beta():
        return original(kernel, **call)
    if serving.plan.exact:
        return _step_kept(**call)
    b = call["b"]
    if runs_kernels(b) and b.dtype != torch.float32:
        # SGLang's verify keeps beta in float32
        call["b"] = b.sigmoid().float().logit()
    return original(kernel, **call)


def _step_kept(
    *, intermediate_states_buffer: Any, intermediate_state_indices: Any, query_start_loc: Any, cache_indices: Any,
    ssm_states: Any, **call: Any,
) -> Any:  # fmt: skip
    bs = len(query_start_loc) - 1
    rows = intermediate_state_indices[:bs].long()
    q, k, v = (call[name].flatten(0, -3) for name in "qkv")
    outputs = stepped.step_verify(
        *(q, k, v, call["a"], call["b"], call["A_log"], call["dt_bias"], ssm_states, cache_indices[:bs]),
        width=len(q) // bs,
        scale=q.shape[-1] ** -0.5,
        keep=lambda t, after: intermediate_states_buffer.select(1, t).index_copy_(0, rows, after),
    )
    return outputs.view(call["v"].shape)


def pool_records(states: Any) -> Records:
    return Records(*(getattr(states, f"replayssm_{ring}") for ring in _RINGS))


def build_pool(original: Callable[..., Any], configurator: Any, **sizes: Any) -> Any:
    """Hook around ``KVCacheConfigurator._build_hybrid_req_pool``, which allows a replay for KDA models only."""
    # for this check only
    if serving.plan is not None and configurator.hybrid_kda_config is None:
        configurator = copy.copy(configurator)
        configurator.hybrid_kda_config = configurator.hybrid_gdn_config
    return original(configurator, **sizes)
