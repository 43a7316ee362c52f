"""Commit: advance recurrent states to the last accepted position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from sglang.kernels.ops.mamba.mamba_state_scatter_triton import scatter_mamba_states_after_mtp_verify
from sglang.srt.layers.attention.hybrid_linear_attn_backend import track_mamba_states_all_layers
from sglang.srt.runtime_context import get_schedule, mamba_track_grid
from torch import Tensor

from sglang_dflash.states.replay import gdn_commit, pool_records

if TYPE_CHECKING:
    from sglang.srt.managers.tp_worker import TpModelWorker

    from sglang_dflash.step.step import Step


class RecurrentCommit:
    """Commits each request's recurrent state (GDN and convolution) after its last accepted token.

    It also takes snapshots at track boundaries of the prefix cache. It runs before a step is published: after that the
    scheduler may reuse state slots.
    """

    compiles_every_batch = False  # whether a commit is compiled for each batch size
    state_table: Tensor | None = None  # by request row; None for a target without recurrent states

    def __init__(self, target_worker: TpModelWorker) -> None:
        self._requests = target_worker.model_runner.req_to_token_pool
        if getattr(self._requests, "mamba_pool", None) is not None:
            self.state_table = self._requests.req_index_to_mamba_index_mapping
            self._track_every = mamba_track_grid(get_schedule().page_size)

    def prepare(self, step: Step) -> None:
        """Decide whether to take snapshots: most steps cross no boundary, and a snapshot costs as much as a commit."""
        if self.state_table is not None:
            growth, every = step.state.in_flight + step.width, self._track_every  # host lengths lag one step
            step.track_every = every if may_cross(step.state.committed_cpu, growth, every) else 0

    def advance(self, step: Step) -> None:
        if self.state_table is None:
            return
        track = step.batch.mamba_track_indices if step.track_every else None  # slots of snapshots, negative: none
        if step.width > 1:
            self._commit(step, track)
        elif track is not None:  # width 1 has advanced the states in place
            cache, crosses = self._requests.mamba_pool.mamba_cache, step.accepted.counts[1] > 0
            track_mamba_states_all_layers(
                cache.conv[0], cache.temporal, step.state_slots, crosses, track, len(track), check_freed_slots=True
            )

    def _commit(self, step: Step, track: Tensor | None) -> None:
        self.replay(step, track)
        states, accepted = self._requests.mamba_pool.mamba_cache, step.accepted
        windows = replace(states, temporal=states.temporal[:0])  # the states are advanced
        last_tracked = None if track is None else accepted.ends[1]
        scatter_mamba_states_after_mtp_verify(windows, step.state_slots, accepted.ends[0], track, last_tracked)

    def replay(self, step: Step, track: Tensor | None) -> None:
        """Advance the GDN states by the accepted records, and write those of ``track``, slots ``[bs]``."""
        states, accepted, slots = self._requests.mamba_pool.mamba_cache, step.accepted, step.state_slots
        assert slots is not None
        tracked = () if track is None else (track, accepted.counts[1])
        rows = step.batch.req_pool_indices
        gdn_commit(states.temporal, pool_records(states), rows, slots, accepted.accept_lens, *tracked)


def may_cross(lengths: Sequence[int], growth: int, interval: int) -> bool:
    return any(length % interval + growth >= interval for length in lengths)
