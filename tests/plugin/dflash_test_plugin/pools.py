"""Mode ``pools``: what ``/server_info`` says of a server at rest: slots that are lost, all of which must be 0."""

from __future__ import annotations

from typing import Any


def count(result: Any, scheduler: Any, *_: Any) -> Any:
    """After ``Scheduler.get_internal_state``: slots neither free nor kept by the prefix cache, and what holds on."""
    requests, kv, cache = scheduler.req_to_token_pool, scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    stats = scheduler.pool_stats_observer.get_pool_stats()
    result.internal_state["pools"] = {
        "kv slots": kv.size - stats.full_available_size - stats.full_evictable_size,
        "states": requests.mamba_pool.size - stats.mamba_available_size - stats.mamba_evictable_size,
        # A row brings its ring of the drafter's K/V and its records of a block, which nothing hands out by themselves.
        "rows": requests.size - requests.available_size(),
        "locked in the prefix cache": cache.full_protected_size() + cache.mamba_protected_size(),
        "steps without counts": len(scheduler.draft_worker._observer._steps._uncounted),
    }
    return result
