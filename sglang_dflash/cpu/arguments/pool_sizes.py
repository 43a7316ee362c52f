"""Pool sizes that fit a CPU machine, where nobody said otherwise.

SGLang sizes its pools to fill a fraction of the device's memory. On a CPU the device's memory is the machine's: a tiny
model would zero gigabytes at start (the recurrent-state pool alone took 5 GB of 24). So both pools are capped at what
the requests that may run can use, as long as that is a small part of the memory; a model for which it is not keeps
SGLang's own sizing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_dflash.memory.sizes import state_bytes, target_kv_per_token

MAX_RUNNING_REQUESTS = 32
TOKENS_PER_REQUEST = 8192
STATES_PER_REQUEST = 8  # working state, two tracked snapshots, and as many again in the prefix cache
SMALL_PART = 0.1  # of the memory that is available


@dataclass(frozen=True)
class ModelBytes:
    """Sizes of one model's per-token and per-request state, in bytes, over all ranks."""

    kv_per_token: int
    state_per_request: int  # zero without recurrent layers


def pool_defaults(sizes: ModelBytes, *, running: int, context: int, available: int) -> dict[str, int]:
    """Server arguments ``max_total_tokens`` and ``max_mamba_cache_size``, as far as a cap makes sense.

    Args:
        sizes: bytes that a token and a request take.
        running: requests that may run at once.
        context: longest sequence the model takes, tokens.
        available: free memory of the machine, bytes.
    """
    tokens = running * min(context, TOKENS_PER_REQUEST)
    states = running * STATES_PER_REQUEST
    budget = available * SMALL_PART
    defaults = {}
    if tokens * sizes.kv_per_token <= budget:
        defaults["max_total_tokens"] = tokens
    if sizes.state_per_request and states * sizes.state_per_request <= budget:
        defaults["max_mamba_cache_size"] = states
    return defaults


def model_bytes(config: Mapping[str, Any], dtype_bytes: int) -> ModelBytes:
    """Sizes from a target's (text) config: its attention layers hold K/V, its linear layers a recurrent state.

    Args:
        config: the text config as SGLang or the checkpoint has it; SGLang's drops ``layer_types`` of hybrids and keeps
            ``full_attention_interval``.
        dtype_bytes: bytes of one element of K, V and the convolution state; the recurrent state is float32.
    """
    state = state_bytes(config, recurrent_bytes=4, conv_bytes=dtype_bytes, tp_size=1)
    return ModelBytes(target_kv_per_token(config, kv_bytes=dtype_bytes, tp_size=1), state.slot)
