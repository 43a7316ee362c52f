"""Pool sizes that fit a CPU machine, for a user who chose none.

SGLang sizes its pools to fill a fraction of the device's memory. On a CPU the device's memory is the machine's: a tiny
model would zero gigabytes at start (the recurrent-state pool alone took 5 GB of 24). So both pools are capped at what
the requests that may run can use, as long as that is a small part of the memory; a model for which it is not keeps
SGLang's own sizing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_dflash.memory.sizes import state_bytes, target_kv_per_token

MAX_RUNNING_REQUESTS = 32
TOKENS_PER_REQUEST = 8192
STATES_PER_REQUEST = 8  # working state, two tracked snapshots, and as many again in the prefix cache
SMALL_PART = 0.1  # of the memory that is available


def pool_defaults(
    config: Mapping[str, Any], *, dtype_bytes: int, running: int, context: int, available: int
) -> dict[str, int]:
    """Server arguments ``max_total_tokens`` and ``max_mamba_cache_size``, as far as a cap makes sense.

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
