"""Commit: recurrent layers advance to the last accepted position."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

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


class RecurrentCommit:
    """Commits each request's recurrent state (GDN and convolution) after its last accepted token.

    The verify kept the state after every block position, or what each position wrote. A request that crosses a
    prefix-cache track boundary inside the block also gets a snapshot of the state there. A block of the anchor alone
    has advanced the states in place, so only the snapshot is left to take. Does nothing for a target without recurrent
    layers.

    Args:
        target_worker: the target's.
        replays: whether the verify kept what each position wrote.
    """

    def __init__(self, target_worker: TpModelWorker, *, replays: bool) -> None:
        self._target, self._replays = target_worker, replays
        self._requests = target_worker.model_runner.req_to_token_pool
        self._recurrent = getattr(self._requests, "mamba_pool", None) is not None

    def before_verify(self, step: Step) -> None:
        """Fill ``step.state_slots``, while the requests still own them.

        The scheduler may end a request once the verify has read its slots. The commit of that surplus step comes later:
        a slot looked up then may already hold the state of the row's next request.
        """
        if self._recurrent:
            step.state_slots = self._requests.get_mamba_indices(step.batch.req_pool_indices)

    def __call__(self, step: Step) -> None:
        """Commit ``step.accepted``; the batch's ``seq_lens`` must still hold the lengths before the step."""
        if not self._recurrent:
            return
        track = self._track(step)
        if step.width == 1:
            if track is not None:
                self._snapshot(step, track)
        elif self._replays:
            self._replay(step, track)
        else:
            self._choose(step, track)

    def _track(self, step: Step) -> Track | None:
        """Snapshots of this step: a few steps have one, and it costs as much as the commit."""
        slots = step.batch.mamba_track_indices
        if slots is None:
            return None
        # The host's lengths lag: a request may gain the block that the host has not heard of, and this one.
        growth, grid = get_alloc_reserve_per_decode(), mamba_track_grid(step.batch.tree_cache.page_size)
        if not may_cross(step.state.committed_cpu, growth, grid):
            return None
        return Track(slots, crossings(step.batch.seq_lens, step.accepted.new_seq_lens, grid))

    def _snapshot(self, step: Step, track: Track) -> None:
        """Copy the states, which the verify has advanced in place."""
        cache, mask = self._requests.mamba_pool.mamba_cache, (track.positions >= 0) & (track.slots >= 0)
        track_mamba_states_all_layers(cache.conv[0], cache.temporal, step.state_slots, mask, track.slots, len(mask))

    def _replay(self, step: Step, track: Track | None) -> None:
        """Add up what the accepted positions wrote, and roll the convolution windows back."""
        states, accept_lens = self._requests.get_speculative_mamba2_params_all_layers(), step.accepted.accept_lens
        tracked = () if track is None else (track.slots, track.positions + 1)
        rows = step.batch.req_pool_indices
        gdn_commit(states.temporal, pool_records(states), rows, step.state_slots, accept_lens, *tracked)
        windows = states.conv[0], states.intermediate_conv_window[0]
        fused_conv_window_scatter_with_mask(*windows, step.state_slots, accept_lens - 1)
        if track is not None:
            fused_conv_window_scatter_with_mask(*windows, track.slots, track.positions)

    def _choose(self, step: Step, track: Track | None) -> None:
        """Copy the states after the last accepted position; SGLang's commit takes the slots that the verify read."""
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


class Track(NamedTuple):
    """Snapshots for the prefix cache.

    Attributes:
        slots: int64 [bs], where a request's snapshot goes; negative: nowhere.
        positions: int64 [bs], of the block, whose state it is; -1: the request crosses no boundary.
    """

    slots: Tensor
    positions: Tensor


def crossings(before: Tensor, after: Tensor, interval: int) -> Tensor:
    """Position of the block that ends on a request's last track boundary, int64 [bs]; -1 if it crosses none.

    Args:
        before, after: int64 [bs], committed lengths around the step.
        interval: tokens between boundaries.
    """
    boundary = after // interval * interval
    return torch.where(boundary > before, boundary - before - 1, -1)


def may_cross(lengths: Sequence[int], growth: int, interval: int) -> bool:
    """Whether a request that gains up to ``growth`` tokens may pass a multiple of ``interval``, or end on one."""
    return any(length // interval != (length + growth) // interval for length in lengths)
