"""Load the drafter, and log the memory of both models."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sglang_dflash.drafter.checkpoint import MASK_EMBEDDING
from sglang_dflash.drafter.tensors import load_mask_embedding
from sglang_dflash.model.vocabulary import TargetVocabulary
from sglang_dflash.plan.pools import Pools, RequestState, Sizing, draft_slots
from sglang_dflash.plan.report import division_in_short, lines, plan_in_short
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

if TYPE_CHECKING:
    from sglang_dflash.upstream import ModelRunner, ServerArgs, TpModelWorker

logger = logging.getLogger(__name__)


def load_drafter(
    plan: ServingPlan, target: ModelRunner, layout: Any, *, server_args: ServerArgs, gpu_id: int, nccl_port: int
) -> TpModelWorker:
    """Return SGLang's worker of the drafter, weights loaded; it uses the target's embedding and LM head.

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


def log_memory(plan: ServingPlan, target: ModelRunner, drafter: ModelRunner) -> Pools:
    """Log the memory of this rank, pools allocated; warn if ``--max-running-requests`` do not fit at once."""
    schedule, memory = get_schedule(), allocated_bytes(target, drafter)
    states: Any = getattr(target.req_to_token_pool, "mamba_pool", None)
    slots, tokens, page = 0 if states is None else states.size, target.max_total_num_tokens, schedule.page_size
    ring = None if plan.window is None else plan.window.ring_slots(target.model_config.context_len)
    running, transferred = target.max_running_requests, in_transfer(get_disagg())
    state = RequestState(memory["states"] // (slots + 1), memory["scratch"] // (running + (transferred or 0) + 1))
    sizing = Sizing(
        target_weights=memory["target_weights"],
        drafter_weights=memory["drafter_weights"],
        target_kv=memory["target_kv"] // (tokens + page),
        draft_kv=memory["draft_kv"] // draft_slots(ring, tokens, running, transferred, page=page),
        kept=state,
        replayed=state,
        block=plan.block,
        slots_per_request=slots_per_request(get_server_args()),
        context=target.model_config.context_len,
        max_running=schedule.max_running_requests,
        page=page,
        ring=ring,
        in_transfer=transferred,
        copies=plan.copies,
    )
    pools = Pools(sizing, plan.replay, tokens, slots, running)
    logger.info(
        "DFLASH: %d of %d requests at once; %s; %s\n  %s",
        *(running, sizing.max_running, plan_in_short(plan, recurrent=state.slot > 0)),
        *(", ".join(division_in_short(pools)), "\n  ".join(lines(pools))),
    )
    if running < sizing.max_running:
        logger.warning(
            "DFLASH: --max-running-requests is %d, but only %d requests fit at once; %s are the limit. Fix: %s, or a "
            "higher --mem-fraction-static; run `sglang-dflash check` to see how far each helps",
            *pools.requests.values(),
        )
    return pools
