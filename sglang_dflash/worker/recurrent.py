"""Recurrent commit: linear-attention layers advance to the last accepted position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sglang_dflash.ops import Accepted
from sglang_dflash.upstream import (
    commit_mamba_states_after_verify,
    get_alloc_reserve_per_decode,
    mamba_track_grid,
)
from sglang_dflash.worker.observe.traced import traced
from sglang_dflash.worker.step import Step


@traced("dflash.commit")
def commit(batch: Any, step: Step, accepted: Accepted, committed: Sequence[int], target_worker: Any) -> None:
    """Commit each request's recurrent state (GDN and convolution) after its last accepted token.

    Verification kept the state after every block position. A request that crosses a prefix-cache track
    boundary inside the block gets that boundary's state snapshotted too. ``batch.seq_lens`` must still hold
    the lengths before the step. Does nothing for a target without recurrent layers.

    Args:
        committed: the host's lengths before the step, at most one block behind.
    """
    if getattr(target_worker.model_runner.req_to_token_pool, "mamba_pool", None) is None:
        return
    last_step = None
    if batch.mamba_track_indices is not None:
        # What a request may gain until the host hears of it: the block that it has not heard of, and this one.
        growth = get_alloc_reserve_per_decode()
        if not may_cross(committed, growth, mamba_track_grid(batch.tree_cache.page_size)):
            # Snapshots cost as much as the commit, and at most steps no request is near a boundary.
            batch.mamba_track_indices = None
    if batch.mamba_track_indices is None:
        last_step = (accepted.accept_lens.long() - 1, None)
    chain = torch.arange(step.block.positions.numel(), dtype=torch.int32, device=accepted.accept_lens.device)
    commit_mamba_states_after_verify(
        target_worker,
        batch,
        accept_lens=accepted.accept_lens,
        accept_index=chain.view(-1, step.width),
        draft_token_num=step.width,
        prepared_step_indices=last_step,
    )


def may_cross(lengths: Sequence[int], growth: int, interval: int) -> bool:
    """Whether a request that gains up to ``growth`` tokens may pass a multiple of ``interval``, or end on one."""
    return any(length // interval != (length + growth) // interval for length in lengths)
