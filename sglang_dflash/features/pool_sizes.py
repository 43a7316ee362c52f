"""The division of device memory between recurrent states and K/V, with both models loaded."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.pool_configurator import create_memory_pool_configurator
from sglang.srt.runtime_context import get_context, get_disagg, get_memory, get_parallel, get_schedule

from sglang_dflash.errors import DFlashError
from sglang_dflash.launch.division import TokenPools, size, state_slots, window_tokens
from sglang_dflash.launch.plan import ServingPlan, current
from sglang_dflash.launch.settings import in_transfer
from sglang_dflash.upstream.hooks import Hooks

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)
_RAISED_BY = {  # flags by the limit of concurrent requests
    "recurrent states": "--mamba-full-memory-ratio, --mamba-ssm-dtype bfloat16",
    "tokens of K/V": "a lower --mamba-full-memory-ratio, --speculative-draft-window-size",
}


def divide(original: Callable[..., Any], configurator: Any, total_rest_memory: float) -> Any:
    """Hook around ``KVCacheConfigurator._handle_max_mamba_cache``, called with the GiB for recurrent states and K/V.

    Subtract the convolution windows of a replay, and the scratch of requests in transfer: SGLang omits both. Set the
    number of states, unless the user set it. Without a prefix cache, and on a decoding server, SGLang allocates one
    state per request.

    Raises:
        DFlashError: the weights leave too little for one request.
    """
    plan, schedule, groups = current.worker.plan, get_schedule(), configurator.attn_dp_size
    params, requests = configurator.mambaish_config.mamba2_cache_params, max(1, schedule.max_running_requests // groups)
    window = sum(math.prod(shape) // min(shape) * (min(shape) + plan.block - 1) for shape in params.shape.conv)
    windows = window * params.dtype.conv.itemsize * len(params.layers)
    record = params.replayssm_ring_bytes_per_req(record_len=plan.records)
    moving = in_transfer(get_disagg()) or 0
    total_rest_memory -= ((requests + 1 + moving) * windows + moving * record) / (1 << 30)
    if schedule.max_mamba_cache_size is None and not get_memory().disable_radix_cache:
        draft = 0 if plan.window is None else configurator.dflash_draft_cell_size_per_token or 0
        free, records = total_rest_memory * (1 << 30), (requests + 1) * record
        context = configurator.model_config.context_len
        slot, per_request = params.mamba_cache_per_req, configurator._calculate_mamba_ratio()
        slots = state_slots(
            free,
            ratio=schedule.mamba_full_memory_ratio,
            records=records,
            slot=slot,
            per_request=per_request,
            requests=requests,
            token=create_memory_pool_configurator(configurator)._cell_size - draft,
            context=context,
            window=0 if plan.window is None else plan.window.slots(context) * draft,
        )
        if slots < per_request:
            raise DFlashError(
                f"the weights leave {size(max(0, free)) or 'nothing'} of static memory, and the states of one request "
                f"and the replay records of {requests} take {size(records + (per_request + 1) * slot)}, without K/V",
                remedy="raise --mem-fraction-static or --tp-size, lower --max-running-requests, or serve a quantised "
                "target (FP8)",
            )
        get_context().override("sglang_dflash", max_mamba_cache_size=slots * groups)  # SGLang divides it by the groups
    return original(configurator, total_rest_memory)


def token_pools(plan: ServingPlan, target: ModelRunner) -> TokenPools:
    """Return the K/V pools that this rank allocated."""
    pool: Any = target.token_to_kv_pool
    if not isinstance(pool, SWAKVPool):
        return TokenPools(target.max_total_num_tokens)
    window = window_tokens(int(target.sliding_window_size or 0), plan.block, pool.page_size)
    return TokenPools(target.max_total_num_tokens, pool.size_swa, window)


def log_pools(plan: ServingPlan, target: ModelRunner, slots_per_request: int) -> dict[str, int | str]:
    """Log what this rank allocated, and warn if ``--max-running-requests`` do not fit at once.

    Returns:
        For ``/server_info``: requested and concurrent requests, what limits them, and what raises the limit.
    """
    states: Any = getattr(target.req_to_token_pool, "mamba_pool", None)
    slots, pools = 0 if states is None else states.size, token_pools(plan, target)
    requested = max(1, get_schedule().max_running_requests // get_parallel().attn_dp_size)
    running = target.max_running_requests
    counts: dict[str, int | str] = {"asked": requested, "running": running, "capped_by": "--max-running-requests"}
    prefixes = max(0, slots - running * (slots_per_request - 1)) if slots_per_request > 1 else 0
    each, limit = pools.per_request(running)
    sliding = "" if pools.sliding is None else f", {pools.sliding:,} in sliding layers"
    logger.info(
        "DFLASH: %d of %d requests at once; block %d; K/V %s tokens%s (%s per request%s)%s",
        *(running, requested, plan.block),
        *(f"{pools.tokens:,}", sliding, f"{each:,}", f", limited by {limit}" if sliding else ""),
        f", {prefixes:,} cached prefixes" if slots else "",
    )
    if running < requested:
        cap = "recurrent states" if slots and running == slots // slots_per_request else "tokens of K/V"
        counts |= {"capped_by": cap, "raised_by": _RAISED_BY[cap]}
        logger.warning(
            "DFLASH: --max-running-requests is %d, but only %d requests fit at once; %s are the limit. Fix: %s, or a "
            "higher --mem-fraction-static; run `sglang-dflash check` to see how far each helps",
            *(requested, running, cap, _RAISED_BY[cap]),
        )
    return counts


HOOKS = Hooks(around={"mem_cache.kv_cache_configurator.KVCacheConfigurator._handle_max_mamba_cache": divide})
