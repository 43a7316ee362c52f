"""Copies between slots of the recurrent-state pools: prefix-cache tracking, and the commit after a verify.

Pools hold one row per slot. SGLang never hands out slot 0: padding rows of a batch point at it, or carry a
negative slot. Both read and write slot 0, which no real request reads: there is no branch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def live_slots(indices: Tensor) -> Tensor:
    """Slot numbers as an int64 index ``[bs]``, with padding (negative) sent to the reserved slot 0."""
    return indices.clamp(min=0).long()


def track(
    conv_states_pool: Tensor,
    ssm_states_pool: Tensor,
    cache_indices: Tensor,
    mamba_track_mask: Tensor,
    mamba_track_indices: Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """Copy the state of every masked request to its track slot, in all layers; runs once per decode step.

    Args:
        conv_states_pool: ``[layers, slots, dim, width - 1]``, updated in place.
        ssm_states_pool: ``[layers, slots, HV, V, K]``, updated in place.
        cache_indices: slot of each request, ``[bs]``.
        mamba_track_mask: which requests reached a track boundary, bool ``[bs]``.
        mamba_track_indices: slot that receives the copy, ``[bs]``.
        batch_size: number of leading rows that are requests.
        check_freed_slots: slots may be negative, meaning freed; such a copy is harmless here.
    """
    mask = mamba_track_mask[:batch_size]
    # Boundaries are rare (one step in `mamba_track_interval`): check before copying whole states.
    if not mask.any():
        return
    source = live_slots(cache_indices[:batch_size][mask])
    target = live_slots(mamba_track_indices[:batch_size][mask])
    for pool in (conv_states_pool, ssm_states_pool):
        pool.index_copy_(1, target, pool.index_select(1, source))


def scatter_steps(
    dst: Tensor,
    src: Tensor,
    dst_indices_raw: Tensor,
    step_indices_raw: Tensor,
    src_indices_raw: Tensor | None = None,
) -> None:
    """Copy each request's state after one block position to a slot, in all layers.

    Args:
        dst: ``[layers, slots, ...]``, updated in place.
        src: ``[layers, rows, block, ...]``.
        dst_indices_raw: slot of each request, ``[bs]``.
        step_indices_raw: block position, ``[bs]``; -1: nothing is copied.
        src_indices_raw: row of each request in ``src``, ``[bs]``; its batch row by default.
    """
    rows = torch.arange(len(step_indices_raw)) if src_indices_raw is None else src_indices_raw.long()
    target = live_slots(torch.where(step_indices_raw >= 0, dst_indices_raw, 0))
    dst.index_copy_(1, target, src[:, rows, step_indices_raw.clamp(min=0)])


def commit(
    mamba_caches: Any,
    state_indices_tensor: Tensor,
    last_correct_step_indices: Tensor,
    mamba_track_indices: Tensor | None,
    mamba_steps_to_track: Tensor | None,
    src_indices_raw: Tensor | None = None,
) -> None:
    """Commit, in all layers, the state after the last accepted token, and the one at a track boundary.

    Runs between accept and publish, so it must not wait for a value on the host.

    Args:
        mamba_caches: the pools, ``temporal [layers, slots, HV, V, K]`` and a list ``conv`` of
            ``[layers, slots, dim, width - 1]``; and what the verify wrote for every position of the block,
            ``intermediate_ssm [layers, rows, block, HV, V, K]`` and, in a list like ``conv``,
            ``intermediate_conv_window [layers, rows, block, dim, width - 1]``.
        state_indices_tensor: slot of each request, ``[bs]``.
        last_correct_step_indices: block position of the last accepted token, ``[bs]``; -1: commit nothing.
        mamba_track_indices: track slot of each request, ``[bs]``; None if prefix states are not tracked.
        mamba_steps_to_track: block position whose state the track slot gets, ``[bs]``; -1: none was crossed.
        src_indices_raw: row of each request in the intermediate buffers, ``[bs]``; its batch row by default.
    """
    bs = last_correct_step_indices.shape[0]
    rows = torch.arange(bs) if src_indices_raw is None else src_indices_raw.long()
    commits = [(state_indices_tensor, last_correct_step_indices)]
    if mamba_track_indices is not None and mamba_steps_to_track is not None:
        commits.append((mamba_track_indices, mamba_steps_to_track))
    pools = [mamba_caches.temporal, *mamba_caches.conv]
    written = [mamba_caches.intermediate_ssm, *mamba_caches.intermediate_conv_window]
    for slots, steps in commits:
        for pool, per_step in zip(pools, written, strict=True):
            scatter_steps(pool, per_step, slots, steps, rows)
