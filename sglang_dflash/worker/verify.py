"""Verify: one target forward over the drafted block."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sglang_dflash.upstream import CaptureHiddenMode, prepare_mamba_track_for_verify
from sglang_dflash.worker.observe.traced import traced
from sglang_dflash.worker.step import Step


@traced("dflash.verify")
def verify(batch: Any, step: Step, tokens: Tensor, target_worker: Any) -> Any:
    """Run the target over ``tokens`` (int64 [bs, w]) behind the committed context.

    Recurrent layers start from the committed state and leave it alone: they keep the state after each
    position aside until :mod:`~sglang_dflash.worker.recurrent` commits one of them.

    Returns:
        SGLang's ``GenerationBatchResult``: logits [bs * w, V] and the captured hidden states [bs * w, K * H].
    """
    # The recurrent states' track slots are looked up per step, before init_new snapshots them into the
    # forward batch.
    prepare_mamba_track_for_verify(batch)
    forward_batch = step.forward_batch(batch, target_worker.model_runner, tokens, CaptureHiddenMode.FULL)
    return target_worker.forward_batch_generation(batch=None, forward_batch=forward_batch, is_verify=True)
