"""KV slots, the K/V pool and the recurrent-state pools in plain torch.

SGLang never allocates state slot 0; padding rows (slot 0 or negative) read and write it.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from torch import Tensor

PADDING_SLOT = 0


def block_slots(
    *, req_pool_indices: Tensor, req_to_token: Tensor, start_offset: Tensor, draft_token_num: int, **unused: Any
) -> Tensor:
    """Return the KV slots ``[B*T]`` int64 of ``draft_token_num`` positions from ``start_offset [B]`` on."""
    columns = start_offset.unsqueeze(1) + torch.arange(draft_token_num)
    return req_to_token[req_pool_indices.unsqueeze(1), columns].view(-1).long()


def assign_slots(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    batch_size: int,
) -> None:
    """Write KV slots ``out_cache_loc [N]``, request after request, to positions ``start_offset .. end_offset - 1``."""
    lens = end_offset - start_offset
    total = out_cache_loc.shape[0]
    rows = req_pool_indices.repeat_interleave(lens, output_size=total)
    # Slot n's position is its index among its request's slots, plus the request's start.
    offset = (start_offset - (lens.cumsum(0) - lens)).repeat_interleave(lens, output_size=total)
    req_to_token[rows, torch.arange(total) + offset] = out_cache_loc.to(req_to_token.dtype)


def last_slots(req_to_token: Tensor, req_pool_indices_tensor: Tensor, prefix_lens_tensor: Tensor) -> Tensor:
    """Return the KV slot ``[B]`` of the last token of each request's prefix, -1 without a prefix."""
    slots = req_to_token[req_pool_indices_tensor, (prefix_lens_tensor - 1).clamp_(min=0)]
    return torch.where(prefix_lens_tensor > 0, slots.to(prefix_lens_tensor.dtype), -1)


class CpuKVPool(MHATokenToKVPool):
    """``k_buffer`` and ``v_buffer``: per layer ``[slots, kv_heads, head_dim]``."""

    def _init_kv_copy_and_warmup(self) -> None:
        self._kv_copy_config = None
        self.use_native_move_kv_cache = True

    def _store_kv_layer(self, layer_idx: int, loc: Tensor, cache_k: Tensor, cache_v: Tensor) -> None:
        self.k_buffer[layer_idx].index_copy_(0, loc, cache_k)
        self.v_buffer[layer_idx].index_copy_(0, loc, cache_v)

    def set_kv_buffer_prefix_valid(
        self, layer: Any, loc_2d: Tensor, commit_lens: Tensor, cache_k: Tensor, cache_v: Tensor, *args: Any, **kw: Any
    ) -> None:
        """Write the accepted prefix of every block, and other rows to the padding slot, without a count on the host.

        Args:
            loc_2d, commit_lens: slots ``[B, T]`` int64 and accepted tokens ``[B]``.
            cache_k, cache_v: ``[B*T, kv_heads, head_dim]``.
        """
        accepted = torch.arange(loc_2d.shape[1]) < commit_lens.unsqueeze(1)
        loc = torch.where(accepted, loc_2d, PADDING_SLOT).view(-1)
        self.set_kv_buffer(layer, loc, cache_k, cache_v, *args, **kw)


def live_slots(indices: Tensor) -> Tensor:
    """Return slot numbers as an int64 index ``[bs]``; padding (negative) becomes slot 0."""
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
    """Copy every masked request's state to its track slot, in all layers; runs once per decode step.

    Args:
        conv_states_pool, ssm_states_pool: ``[layers, slots, ...]``, updated in place.
        cache_indices, mamba_track_mask, mamba_track_indices: slot, boundary reached, destination slot, ``[bs]``; rows
            from ``batch_size`` on are padding.
        check_freed_slots: unused; a copy to a negative slot is harmless.
    """
    mask = mamba_track_mask[:batch_size]
    # Few steps reach a boundary: check before copying whole states.
    if not mask.any():
        return
    source = live_slots(cache_indices[:batch_size][mask])
    target = live_slots(mamba_track_indices[:batch_size][mask])
    for pool in (conv_states_pool, ssm_states_pool):
        pool.index_copy_(1, target, pool.index_select(1, source))


def track_layer(conv_states: Tensor, ssm_states: Tensor, *args: Any, **kw: Any) -> None:
    """:func:`track` in one layer, with pools ``[slots, ...]``."""
    track(conv_states[None], ssm_states[None], *args, **kw)


def scatter_steps(
    dst: Tensor,
    src: Tensor,
    dst_indices_raw: Tensor,
    step_indices_raw: Tensor,
    src_indices_raw: Tensor | None = None,
) -> None:
    """Copy each request's state after one block position to a slot, in all layers.

    Args:
        dst: ``[layers, slots, ...]``, updated in place; src: ``[layers, rows, block, ...]``.
        dst_indices_raw, step_indices_raw: slot and block position, ``[bs]``; position -1 copies nothing.
        src_indices_raw: row of each request in ``src``, ``[bs]``; default: its batch row.
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
    """Commit in all layers the state after the last accepted token, and the one at a track boundary.

    Args:
        mamba_caches: pools ``temporal`` and list ``conv``, ``[layers, slots, ...]``; the verify's ``intermediate_ssm``
            and list ``intermediate_conv_window``, ``[layers, rows, block, ...]``; a pool without layers is skipped.
        state_indices_tensor, last_correct_step_indices: slot and block position of the last accepted token, ``[bs]``;
            position -1 commits nothing.
        mamba_track_indices, mamba_steps_to_track: the same for the track slot, or None.
        src_indices_raw: row of each request in the verify's states, ``[bs]``; default: its batch row.
    """
    rows = torch.arange(len(last_correct_step_indices)) if src_indices_raw is None else src_indices_raw
    commits = [(state_indices_tensor, last_correct_step_indices)]
    if mamba_track_indices is not None and mamba_steps_to_track is not None:
        commits.append((mamba_track_indices, mamba_steps_to_track))
    pools = [mamba_caches.temporal, *mamba_caches.conv]
    written = [mamba_caches.intermediate_ssm, *mamba_caches.intermediate_conv_window]
    for slots, steps in commits:
        for pool, per_step in zip(pools, written, strict=True):
            if len(pool):
                scatter_steps(pool, per_step, slots, steps, rows)
