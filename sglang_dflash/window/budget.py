"""Under a draft window, the memory that the drafter's K/V no longer takes goes to the target's.

SGLang sizes the target's K/V pool so that the drafter's, as many slots, fits beside it. Rings are a fixed amount, so
they are taken off the budget once, and a token costs only what the target stores of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from sglang_dflash.memory.fit import rings
from sglang_dflash.memory.slots import in_transfer
from sglang_dflash.upstream import get_disagg, get_schedule
from sglang_dflash.window.served import served_window


def charge_rings(
    original: Callable[..., Any], configurator: Any, budget_bytes: int, *, cap_tokens: int | None = None
) -> Any:
    """Around SGLang's division of the memory for K/V.

    Args:
        configurator: SGLang's ``KVCacheConfigurator`` of the target.
        budget_bytes: memory of this rank for the K/V of target and drafter.
        cap_tokens: the pool's size so far. SGLang gives it when it sizes the pool again after graph capture
            (``SGLANG_ENABLE_POST_CAPTURE_KV_SIZING``), from the memory that is free then: the rings exist already.
    """
    window, per_token = served_window(), configurator.dflash_draft_cell_size_per_token
    if window is None or not per_token or configurator.is_draft_worker:
        return original(configurator, budget_bytes, cap_tokens=cap_tokens)
    if cap_tokens is None:
        slots = window.ring_slots(configurator.model_config.context_len)
        held = rings(int(get_schedule().max_running_requests), in_transfer(get_disagg()))
        budget_bytes -= held * slots * per_token
    targets_only = copy.copy(configurator)
    targets_only.spec_aux_config = copy.copy(configurator.spec_aux_config)
    targets_only.spec_aux_config.dflash_draft_num_layers = None
    targets_only.dflash_draft_cell_size_per_token = None
    return original(targets_only, budget_bytes, cap_tokens=cap_tokens)
