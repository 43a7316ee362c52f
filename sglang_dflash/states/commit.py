"""Commit: recurrent layers advance to the last accepted position."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglang_dflash.upstream import (
    commit_mamba_states_after_verify,
    get_alloc_reserve_per_decode,
    mamba_track_grid,
    track_mamba_states_all_layers,
)

if TYPE_CHECKING:
    from sglang_dflash.upstream import ScheduleBatch, TpModelWorker
    from sglang_dflash.worker.step import Step


class RecurrentCommit:
    """Commits each request's recurrent state (GDN and convolution) after its last accepted token.

    The verify kept the state after every block position, or what each position wrote. A request that crosses a
    prefix-cache track boundary inside the block also gets a snapshot of the state there. A block of the anchor alone
    has advanced the states in place, so only the snapshot is left to take. Does nothing for a target without recurrent
    layers.

    Args:
        target_worker: the target's.
    """

    def __init__(self, target_worker: TpModelWorker) -> None:
        self.target_worker = target_worker
        self._recurrent = getattr(target_worker.model_runner.req_to_token_pool, "mamba_pool", None) is not None
        self._chain = torch.empty(0, dtype=torch.int32, device=target_worker.device)

    def __call__(self, step: Step) -> None:
        """Commit ``step.accepted``; the batch's ``seq_lens`` must still hold the lengths before the step."""
        if not self._recurrent:
            return
        batch, accept_lens, last_step = step.batch, step.accepted.accept_lens, None
        if batch.mamba_track_indices is not None:
            # The host's lengths lag: a request may gain the block that the host has not heard of, and this one.
            growth, grid = get_alloc_reserve_per_decode(), mamba_track_grid(batch.tree_cache.page_size)
            if not may_cross(step.state.committed_cpu, growth, grid):
                # A snapshot costs as much as the commit, and at most steps no request is near a boundary.
                batch = copy.copy(batch)
                batch.mamba_track_indices = None
        if step.width == 1:
            if batch.mamba_track_indices is not None:
                self._snapshot(batch, step.accepted.new_seq_lens % grid == 0)
            return
        if batch.mamba_track_indices is None:
            last_step = (accept_lens.long() - 1, None)
        commit_mamba_states_after_verify(
            self.target_worker,
            batch,
            accept_lens=accept_lens,
            accept_index=self._rows(step.tokens.numel()).view(-1, step.width),
            draft_token_num=step.width,
            prepared_step_indices=last_step,
        )

    def _snapshot(self, batch: ScheduleBatch, at_boundary: Tensor) -> None:
        """Copy the states of the requests that are ``at_boundary``, bool [bs], to their track slots, all layers."""
        requests, tracks = self.target_worker.model_runner.req_to_token_pool, batch.mamba_track_indices
        cache = requests.mamba_pool.mamba_cache
        track_mamba_states_all_layers(
            cache.conv[0],
            cache.temporal,
            requests.get_mamba_indices(batch.req_pool_indices),
            at_boundary & (tracks >= 0),
            tracks,
            at_boundary.shape[0],
        )

    def _rows(self, number: int) -> Tensor:
        """The logits' rows of a chain of drafts: int32 [number] 0, 1, ..., kept from step to step."""
        if number > self._chain.numel():
            self._chain = torch.arange(2 * number, dtype=torch.int32, device=self._chain.device)
        return self._chain[:number]


def may_cross(lengths: Sequence[int], growth: int, interval: int) -> bool:
    """Whether a request that gains up to ``growth`` tokens may pass a multiple of ``interval``, or end on one."""
    return any(length // interval != (length + growth) // interval for length in lengths)
