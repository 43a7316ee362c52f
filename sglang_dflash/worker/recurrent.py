"""Recurrent commit: linear-attention layers advance to the last accepted position."""

from __future__ import annotations

from typing import Any

import torch
from torch.profiler import record_function

from sglang_dflash.ops import Accepted
from sglang_dflash.upstream import commit_mamba_states_after_verify
from sglang_dflash.worker.step import Step


@record_function("dflash.commit")
def commit(batch: Any, step: Step, accepted: Accepted, target_worker: Any) -> None:
    """Commit each request's recurrent state (GDN and convolution) after its last accepted token.

    Verification kept the state after every block position. A request that crosses a prefix-cache track
    boundary inside the block gets that boundary's state snapshotted too. ``batch.seq_lens`` must still hold
    the lengths before the step. Does nothing for a target without recurrent layers.
    """
    if getattr(target_worker.model_runner.req_to_token_pool, "mamba_pool", None) is None:
        return
    chain = torch.arange(step.block.positions.numel(), dtype=torch.int32, device=accepted.accept_lens.device)
    commit_mamba_states_after_verify(
        target_worker,
        batch,
        accept_lens=accepted.accept_lens,
        accept_index=chain.view(-1, step.width),
        draft_token_num=step.width,
    )
