"""What the server allocated, read from its allocators: the figures that the preflight's estimate is held to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor


def pool_bytes(target_runner: Any, draft_runner: Any) -> dict[str, int]:
    """Bytes on this rank: parameters, K/V of both models, recurrent states, and verification's scratch."""
    states, scratch = _recurrent(target_runner.req_to_token_pool)
    return {
        "target_weights": _size(target_runner.model.parameters()),
        "drafter_weights": _size(draft_runner.model.parameters()),
        "target_kv": int(sum(target_runner.token_to_kv_pool.get_kv_size_bytes())),  # from numpy, which JSON lacks
        "draft_kv": int(sum(draft_runner.token_to_kv_pool.get_kv_size_bytes())),
        "states": states,
        "scratch": scratch,
    }


def _recurrent(request_pool: Any) -> tuple[int, int]:
    """Committed states with their snapshots, and the states after every position of a block."""
    pool = getattr(request_pool, "mamba_pool", None)
    if pool is None:
        return 0, 0
    cache = pool.mamba_cache
    # The convolution's windows overlap in storage: their view is larger than what was allocated.
    windows = pool._intermediate_conv_window_phys or cache.intermediate_conv_window
    return _size([*cache.conv, cache.temporal]), _size([cache.intermediate_ssm, *windows])


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(int(tensor.numel() * tensor.element_size()) for tensor in tensors)
