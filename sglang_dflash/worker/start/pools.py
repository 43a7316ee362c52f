"""Log the memory table at the start: what this rank allocated, how many requests run at once, and what caps them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sglang_dflash.plan.pools import Pools, draft_slots, history_bytes
from sglang_dflash.plan.report import lines
from sglang_dflash.plan.serving import ServingPlan
from sglang_dflash.plan.sizes import in_transfer, slots_per_request
from sglang_dflash.upstream import get_disagg, get_schedule, get_server_args
from sglang_dflash.worker.observe.identity import allocated_bytes

if TYPE_CHECKING:
    from sglang_dflash.upstream import ModelRunner

logger = logging.getLogger(__name__)

_MORE_PREFIXES = (
    "more prefixes: --max-mamba-cache-size, --mamba-full-memory-ratio, --mamba-ssm-dtype bfloat16; K/V for them: "
    "--speculative-draft-window-size; `sglang-dflash check` says how many and at what price"
)


def tell_pools(plan: ServingPlan, target: ModelRunner, drafter: ModelRunner) -> Pools:
    """Log the table; a warning if fewer requests run at once than were asked for.

    Args:
        target, drafter: the runners, pools allocated.
    """
    schedule, memory = get_schedule(), allocated_bytes(target, drafter)
    states: Any = getattr(target.req_to_token_pool, "mamba_pool", None)
    slots, tokens, page = 0 if states is None else states.size, target.max_total_num_tokens, schedule.page_size
    ring = None if plan.window is None else plan.window.ring_slots(target.model_config.context_len)
    running, transferred = target.max_running_requests, in_transfer(get_disagg())
    pools = Pools(
        replay=plan.replay,
        target_weights=memory["target_weights"],
        drafter_weights=memory["drafter_weights"],
        target_kv=memory["target_kv"] // (tokens + page),
        draft_kv=memory["draft_kv"] // draft_slots(ring, tokens, running, transferred, page=page),
        state=memory["states"] // (slots + 1),
        scratch=memory["scratch"] // (running + (transferred or 0) + 1),
        tokens=tokens,
        page=page,
        state_slots=slots,
        slots_per_request=slots_per_request(get_server_args()),
        block=plan.block,
        asked=schedule.max_running_requests,
        running=running,
        ring=ring,
        in_transfer=transferred,
        history=history_bytes(target.model_config.context_len if plan.copies else None, tokens, plan.block),
    )
    more = [_MORE_PREFIXES] if pools.state and pools.slots_per_request > 1 else []
    logger.info("DFLASH: memory of this rank\n  %s", "\n  ".join([*lines([pools]), *more]))
    if pools.running < pools.asked:
        logger.warning(
            "DFLASH: --max-running-requests %d, but %d fit at once: %s cap them. What would raise that: %s, a higher "
            "--mem-fraction-static; `sglang-dflash check` says how far",
            *pools.requests.values(),
        )
    return pools
