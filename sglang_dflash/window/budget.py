"""Under a draft window, the memory that the drafter's K/V no longer takes goes to the target's.

SGLang sizes the target's K/V pool so that the drafter's, as many slots, fits beside it. Rings are a fixed amount, so
they are taken off the budget once, and a token costs only what the target stores of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from sglang_dflash.upstream import get_schedule, get_spec
from sglang_dflash.window.prefix_cap import served_window
from sglang_dflash.window.size import ring_slots

POOL_CONFIG = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator.config_from_budget"


def charge_rings(original: Callable[..., Any], configurator: Any, budget_bytes: int, **options: Any) -> Any:
    """Around SGLang's division of the memory for K/V.

    Args:
        configurator: SGLang's ``KVCacheConfigurator`` of the target.
        budget_bytes: memory of this rank for the K/V of target and drafter.
    """
    window, per_token = served_window(), configurator.dflash_draft_cell_size_per_token
    if window is None or not per_token or configurator.is_draft_worker:
        return original(configurator, budget_bytes, **options)
    slots = ring_slots(
        window,
        block=get_spec().speculative_num_draft_tokens,
        page=get_schedule().page_size,
        context=configurator.model_config.context_len,
    )
    rings = get_schedule().max_running_requests * slots * per_token
    sizes = configurator.spec_aux_config
    configurator.spec_aux_config = copy.copy(sizes)
    configurator.spec_aux_config.dflash_draft_num_layers = None
    configurator.dflash_draft_cell_size_per_token = None
    try:
        return original(configurator, budget_bytes - rings, **options)
    finally:
        configurator.spec_aux_config, configurator.dflash_draft_cell_size_per_token = sizes, per_token
