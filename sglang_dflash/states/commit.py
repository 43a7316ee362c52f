"""Commit: advance recurrent states to the last accepted position."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglang_dflash.states.replay import gdn_commit, pool_records
from sglang_dflash.upstream import (
    commit_mamba_states_after_verify,
    fused_conv_window_scatter_with_mask,
    get_alloc_reserve_per_decode,
    mamba_track_grid,
    track_mamba_states_all_layers,
)

if TYPE_CHECKING:
    from sglang_dflash.upstream import TpModelWorker
    from sglang_dflash.worker.step import Step


# Snapshots for the prefix cache, int64 [bs]: target slot of each request's snapshot, negative for none, and the
# block position after which it is taken, -1 if the request crosses no boundary
Track = tuple[Tensor, Tensor]


class RecurrentCommit:
    """Commits each request's recurrent state (GDN and convolution) after its last accepted token.

    The verify kept the state after every block position, or recorded what each position wrote. A request that crosses a
    prefix-cache track boundary inside the block also gets a snapshot of the state there. A block of the anchor alone
    has advanced the states in place, so only the snapshot remains. Does nothing for a target without recurrent layers.

    Args:
        replays: whether the verify records writes instead of keeping states.
    """

    def __init__(self, target_worker: TpModelWorker, *, replays: bool) -> None:
        self._target, self._replays = target_worker, replays
        self._requests = target_worker.model_runner.req_to_token_pool
        self._recurrent = getattr(self._requests, "mamba_pool", None) is not None
        self._interval: int | None = None
        self._growth = 0

    def before_verify(self, step: Step) -> None:
        """Fill ``step.state_slots`` while the requests still own them.

        The scheduler may end a request before the commit. By then the row's slot may hold another request's state.
        """
        if self._recurrent:
            step.state_slots = self._requests.get_mamba_indices(step.batch.req_pool_indices)

    def __call__(self, step: Step) -> None:
        """Commit ``step.accepted``; the batch's ``seq_lens`` must still hold the lengths before the step."""
        if not self._recurrent:
            return
        track = self._track(step)
        if step.width > 1:
            (self._commit_records if self._replays else self._commit_kept)(step, track)
        elif track is not None:
            cache, (slots, positions) = self._requests.mamba_pool.mamba_cache, track
            mask = (positions >= 0) & (slots >= 0)
            track_mamba_states_all_layers(cache.conv[0], cache.temporal, step.state_slots, mask, slots, len(mask))

    def _track(self, step: Step) -> Track | None:
        # Most steps cross no boundary, and a snapshot costs as much as a commit.
        slots = step.batch.mamba_track_indices
        if slots is None:
            return None
        if self._interval is None:
            # Host lengths lag one step, so allow for two blocks.
            self._growth = get_alloc_reserve_per_decode()
            self._interval = mamba_track_grid(step.batch.tree_cache.page_size)
        if not may_cross(step.state.committed_cpu, self._growth, self._interval):
            return None
        return slots, crossings(step.batch.seq_lens, step.accepted.new_seq_lens, self._interval)

    def _commit_records(self, step: Step, track: Track | None) -> None:
        states, accept_lens = self._requests.get_speculative_mamba2_params_all_layers(), step.accepted.accept_lens
        tracked = () if track is None else (track[0], track[1] + 1)
        rows = step.batch.req_pool_indices
        gdn_commit(states.temporal, pool_records(states), rows, step.state_slots, accept_lens, *tracked)
        windows = states.conv[0], states.intermediate_conv_window[0]
        fused_conv_window_scatter_with_mask(*windows, step.state_slots, accept_lens - 1)
        if track is not None:
            fused_conv_window_scatter_with_mask(*windows, *track)

    def _commit_kept(self, step: Step, track: Track | None) -> None:
        # SGLang's commit uses the slots that the verify read.
        slots, positions = track or (None, None)
        batch = copy.copy(step.batch)
        batch.mamba_track_indices = slots
        commit_mamba_states_after_verify(
            self._target,
            batch,
            accept_lens=step.accepted.accept_lens,
            accept_index=step.tokens,  # only its size is read
            draft_token_num=step.width,
            prepared_step_indices=(step.accepted.accept_lens.long() - 1, positions),
        )


def crossings(before: Tensor, after: Tensor, interval: int) -> Tensor:
    """Return the block position that ends at each request's last track boundary, int64 [bs]; -1 if it crosses none.

    Args:
        before, after: int64 [bs], committed lengths around the step.
        interval: tokens between boundaries.
    """
    boundary = after // interval * interval
    return torch.where(boundary > before, boundary - before - 1, -1)


def may_cross(lengths: Sequence[int], growth: int, interval: int) -> bool:
    """Return whether a request that gains up to ``growth`` tokens may reach or pass a multiple of ``interval``."""
    return any(length // interval != (length + growth) // interval for length in lengths)
