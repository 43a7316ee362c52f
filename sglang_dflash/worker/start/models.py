"""Load the drafter, allocate its rings under a draft window, and log the memory of both models."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sglang_dflash.drafter.checkpoint import MASK_EMBEDDING
from sglang_dflash.drafter.tensors import load_mask_embedding
from sglang_dflash.model.vocabulary import TargetVocabulary
from sglang_dflash.plan.pools import Pools, draft_slots, history_bytes
from sglang_dflash.plan.report import lines
from sglang_dflash.plan.serving import ServingPlan
from sglang_dflash.plan.settings import in_transfer, slots_per_request
from sglang_dflash.upstream import (
    build_draft_tp_worker,
    draft_pp_context,
    draft_tp_context,
    get_disagg,
    get_schedule,
    get_server_args,
)
from sglang_dflash.worker.observe.metrics import allocated_bytes
from sglang_dflash.worker.window import DraftRings, RowAllocator

if TYPE_CHECKING:
    from sglang_dflash.upstream import ModelRunner, ServerArgs, TpModelWorker

logger = logging.getLogger(__name__)

_MORE_PREFIXES = (
    "more prefixes: --max-mamba-cache-size, --mamba-full-memory-ratio, --mamba-ssm-dtype bfloat16; K/V for them: "
    "--speculative-draft-window-size; run `sglang-dflash check` to see how many and at what cost"
)


def load_drafter(
    plan: ServingPlan, target: ModelRunner, layout: Any, *, server_args: ServerArgs, gpu_id: int, nccl_port: int
) -> TpModelWorker:
    """Return SGLang's worker of the drafter, weights loaded; it uses the target's embedding and LM head.

    Args:
        layout: the drafter's parallel layout.

    Raises:
        DFlashError: the drafter's tensors are unusable, or do not fit the target.
    """
    with draft_pp_context(), draft_tp_context(layout):
        worker: TpModelWorker = build_draft_tp_worker(
            server_args=server_args,
            gpu_id=gpu_id,
            nccl_port=nccl_port,
            target_model_config=target.model_config,
            algo_label="DFLASH",
        ).draft_worker
    vocabulary = TargetVocabulary.of(
        target.model,
        mask_token_id=plan.drafter.mask_token_id,
        mask_embedding=load_mask_embedding(plan.files.path(MASK_EMBEDDING), plan.drafter),
        input_scale=plan.drafter.input_scale,
        logit_scale=plan.drafter.output_scale,
    )
    worker.model_runner.model.set_vocabulary(vocabulary)
    return worker


def allocate_rings(
    plan: ServingPlan, target: ModelRunner, drafter: TpModelWorker, pool_config: Any, request_pool: Any
) -> DraftRings:
    """Allocate the drafter's pool under a draft window.

    Args:
        pool_config: SGLang's ``MemoryPoolConfig`` of the target's pool.
        request_pool: the target's ``ReqToTokenPool``.
    """
    assert plan.window is not None
    rings = DraftRings(request_pool, plan.window, target.model_config.context_len, by_row=plan.role != "null")
    drafter.alloc_memory_pool(
        memory_pool_config=rings.pool_config(pool_config),
        req_to_token_pool=rings.request_pool,
        token_to_kv_pool_allocator=RowAllocator(),
    )
    return rings


def log_memory(plan: ServingPlan, target: ModelRunner, drafter: ModelRunner) -> Pools:
    """Log the memory of this rank; warn if fewer requests run at once than ``--max-running-requests``.

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
            "DFLASH: --max-running-requests is %d, but only %d requests fit at once; %s are the limit. Fix: %s, or a "
            "higher --mem-fraction-static; run `sglang-dflash check` to see how far each helps",
            *pools.requests.values(),
        )
    return pools
