"""Two hooks of a draft window: its rings are charged to the K/V budget, and prefix hits leave a window to prefill."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from sglang_dflash.plan import serving
from sglang_dflash.plan.pools import rings
from sglang_dflash.plan.sizes import in_transfer
from sglang_dflash.upstream import get_disagg, get_schedule


def charge_rings(
    original: Callable[..., Any], configurator: Any, budget_bytes: int, *, cap_tokens: int | None = None
) -> Any:
    """Hook around ``KVCacheConfigurator.config_from_budget``.

    SGLang sizes the target's K/V pool so that a drafter's pool of as many slots fits beside it. Rings are a fixed
    amount: they are taken off the budget once, and a token then costs only what the target stores of it.

    Args:
        configurator: SGLang's ``KVCacheConfigurator`` of the target.
        budget_bytes: memory of this rank for the K/V of target and drafter.
        cap_tokens: the pool's size so far. SGLang passes it when it sizes the pool again after graph capture
            (``SGLANG_ENABLE_POST_CAPTURE_KV_SIZING``), from the memory that is free then: the rings exist already.
    """
    plan, per_token = serving.plan, configurator.dflash_draft_cell_size_per_token
    if plan is None or plan.window is None or not per_token or configurator.is_draft_worker:
        return original(configurator, budget_bytes, cap_tokens=cap_tokens)
    if cap_tokens is None:
        slots = plan.window.ring_slots(configurator.model_config.context_len)
        held = rings(int(get_schedule().max_running_requests), in_transfer(get_disagg()))
        budget_bytes -= held * slots * per_token
    targets_only = copy.copy(configurator)
    targets_only.spec_aux_config = copy.copy(configurator.spec_aux_config)
    targets_only.spec_aux_config.dflash_draft_num_layers = None
    targets_only.dflash_draft_cell_size_per_token = None
    return original(targets_only, budget_bytes, cap_tokens=cap_tokens)


def cap_prefix(longest: int, req: Any, input_len: int) -> int:
    """Hook after ``Req._compute_max_prefix_len``: leave the window's last tokens to the prefill.

    The prefix cache keeps the target's K/V. What the drafter reads of a prompt comes from the target's hidden states,
    which nothing keeps, and lives in the ring of the request that computed it. So a hit ends one window before the
    prompt does: the prefill recomputes at most that many tokens, and the first block already sees its whole window.

    Args:
        longest: SGLang's own bound, tokens.
        input_len: tokens of the request so far.
    """
    plan = serving.plan
    return longest if plan is None or plan.window is None else max(0, min(longest, input_len - plan.window.tokens))
