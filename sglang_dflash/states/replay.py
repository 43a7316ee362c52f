"""State replay: its two operations, and the hook that makes SGLang allocate its pool.

Every commit applies all records of SGLang's ring to the state, so a block's records begin at position 0.
"""

import copy
from collections.abc import Callable
from typing import Any

from sglang.srt.runtime_context import get_exec
from torch import Tensor

from sglang_dflash.ops import by_device
from sglang_dflash.states import reference
from sglang_dflash.states.reference import Records
from sglang_dflash.upstream.hooks import Hooks

gdn_verify = by_device(reference.gdn_verify, "sglang_dflash.states.kernels")
gdn_commit = by_device(reference.gdn_commit, "sglang_dflash.states.kernels")

_RINGS = "d", "k", "g", "rawv", "rawk"  # SGLang's names, in the order of Records


def decode_rounds_beta() -> bool:
    """Return whether plain decoding rounds beta to its input's dtype: Triton's kernel does, FlashInfer's does not."""
    mamba = get_exec().mamba
    return (mamba.linear_attn_decode_backend or mamba.linear_attn_backend) == "triton"


def pool_records(states: Any) -> Records:
    return Records(*(getattr(states, f"replayssm_{ring}") for ring in _RINGS))


def build_pool(original: Callable[..., Any], configurator: Any, **sizes: Any) -> Any:
    """Hook around ``KVCacheConfigurator._build_hybrid_req_pool``, which allows a replay for KDA models only."""
    configurator = copy.copy(configurator)
    configurator.hybrid_kda_config = configurator.hybrid_gdn_config  # for this check only
    pool = original(configurator, **sizes)
    windows = getattr(pool.mamba_pool.mamba_cache, "intermediate_conv_window", [])
    windows[:] = map(windows_by_token, windows)
    return pool


def windows_by_token(windows: Tensor) -> Tensor:
    """Lay out overlapping windows ``[layers, rows, L, dim, taps - 1]`` by token, in their memory.

    SGLang lays them out by channel. By token, a kernel stores, and a commit reads, 16 bytes of inputs at a time.
    """
    layer, row, step, _, column = windows.stride()
    dim = windows.shape[3]
    return windows.as_strided(windows.shape, (layer, row, dim, 1, dim)) if step == column else windows


_POOLS = "mem_cache.kv_cache_configurator.KVCacheConfigurator"
HOOKS = Hooks(
    around={f"{_POOLS}._build_hybrid_req_pool": build_pool, f"{_POOLS}._build_hybrid_mamba_decode_req_pool": build_pool}
)
