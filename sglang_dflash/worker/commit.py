"""Commit: advance recurrent states to the last accepted position."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING

from torch import Tensor

from sglang_dflash.features.feature import Feature
from sglang_dflash.states.replay import gdn_commit, pool_records
from sglang_dflash.states.stepped import gates_of, step_commit
from sglang_dflash.upstream.worker import (
    commit_mamba_states_after_verify,
    mamba_track_grid,
    scatter_mamba_states_after_mtp_verify,
    track_mamba_states_all_layers,
)

if TYPE_CHECKING:
    from sglang_dflash.upstream.worker import TpModelWorker
    from sglang_dflash.worker.step import Step


class RecurrentCommit(Feature):
    """Commits each request's recurrent state (GDN and convolution) after its last accepted token, with snapshots at
    prefix-cache track boundaries.

    ``replays``: the verify records writes instead of keeping states. ``exact``: a replay repeats plain decoding's
    steps.
    """

    def __init__(self, target_worker: TpModelWorker, *, replays: bool, exact: bool) -> None:
        self._target, self._replays = target_worker, replays
        self._requests = target_worker.model_runner.req_to_token_pool
        self._recurrent = getattr(self._requests, "mamba_pool", None) is not None
        self._gates = gates_of(target_worker.model_runner.model) if exact and replays else None
        self._interval = 0
        # by request row
        self.state_table: Tensor | None = self._requests.req_index_to_mamba_index_mapping if self._recurrent else None

    def drafted(self, step: Step) -> None:
        """Most steps cross no boundary, and a snapshot costs as much as a commit."""
        if self._recurrent:
            if not self._interval:
                self._interval = mamba_track_grid(step.batch.tree_cache.page_size)
            growth = step.state.in_flight + step.width  # host lengths lag one step
            step.interval = self._interval if may_cross(step.state.committed_cpu, growth, self._interval) else 0

    def advance(self, step: Step) -> None:
        if not self._recurrent:
            return
        track = step.batch.mamba_track_indices if step.interval else None  # slots of snapshots, negative: none
        if step.width > 1 and self._replays:
            self._commit_records(step, track)
        elif step.width > 1:
            self._commit_kept(step, track)
        elif track is not None:  # width 1 has advanced the states in place
            cache, crosses = self._requests.mamba_pool.mamba_cache, step.accepted.counts[1] > 0
            track_mamba_states_all_layers(
                cache.conv[0], cache.temporal, step.state_slots, crosses, track, len(track), check_freed_slots=True
            )

    def _commit_records(self, step: Step, track: Tensor | None) -> None:
        states, accepted = self._requests.get_speculative_mamba2_params_all_layers(), step.accepted
        assert step.state_slots is not None
        rows, slots, counts = step.batch.req_pool_indices, step.state_slots, accepted.accept_lens
        tracked = None if track is None else accepted.counts[1]
        pool, records = states.temporal, pool_records(states)
        if self._gates is None:
            gdn_commit(pool, records, rows, slots, counts, track, tracked)
        else:
            step_commit(pool, records, self._gates, rows, slots, counts, track, tracked, width=step.width)
        windows = SimpleNamespace(
            temporal=states.temporal[:0],
            intermediate_ssm=None,
            conv=states.conv,
            intermediate_conv_window=states.intermediate_conv_window,
        )
        last_tracked = None if track is None else accepted.ends[1]
        scatter_mamba_states_after_mtp_verify(windows, step.state_slots, accepted.ends[0], track, last_tracked)

    def _commit_kept(self, step: Step, track: Tensor | None) -> None:
        # SGLang's commit uses the slots that the verify read
        batch, accepted = copy.copy(step.batch), step.accepted
        batch.mamba_track_indices = track
        commit_mamba_states_after_verify(
            self._target,
            batch,
            accept_lens=accepted.accept_lens,
            accept_index=step.tokens,  # only its size is read
            draft_token_num=step.width,
            prepared_step_indices=(accepted.ends[0], None if track is None else accepted.ends[1]),
        )


def may_cross(lengths: Sequence[int], growth: int, interval: int) -> bool:
    return any(length % interval + growth >= interval for length in lengths)
