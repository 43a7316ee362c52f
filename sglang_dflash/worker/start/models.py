"""Load the drafter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_dflash.drafter.checkpoint import MASK_EMBEDDING
from sglang_dflash.drafter.tensors import load_mask_embedding
from sglang_dflash.model.vocabulary import TargetVocabulary
from sglang_dflash.plan.serving import ServingPlan
from sglang_dflash.upstream.worker import build_draft_tp_worker, draft_pp_context, draft_tp_context

if TYPE_CHECKING:
    from sglang_dflash.upstream.worker import ModelRunner, ServerArgs, TpModelWorker


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
        logit_cap=plan.drafter.logit_cap,
    )
    worker.model_runner.model.set_vocabulary(vocabulary)
    return worker
