"""SGLang's replay of GDN states by our own operations, while our worker serves.

SGLang's records are rings: an unfolded history, cursors, and a margin that depends on the block's width. Ours are
folded into the state at every commit, so a block's records begin at position 0, whatever its width; nothing is left
over, in a ring that the request's next owner would find. The cursors stay 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from sglang_dflash.drafter.served import our_worker_serves
from sglang_dflash.ops import gdn_commit, gdn_verify
from sglang_dflash.ops.gdn_replay import Records


def verify(original: Callable[..., Any], **call: Any) -> Any:
    """Around ``gdn_replayssm_spec_decode``, which is called once a GDN layer with keywords alone."""
    if not our_worker_serves():
        return original(**call)
    records = _records(call, "d_cache", "k_cache", "g_cache", "rawv_cache", "rawk_cache")
    return gdn_verify(
        call["q"],
        call["k"],
        call["v"],
        call["a"],
        call["b"],
        call["A_log"],
        call["dt_bias"],
        call["checkpoint_state"],
        call["ssm_state_indices"],
        records,
        call["replay_indices"],
        width=call["max_spec_len"],
        scale=call["scale"],
        out=call["out"],
    )


def advance(original: Callable[..., Any], **call: Any) -> None:
    """Around ``commit_gdn_replayssm_spec``, which moves the rings' cursors."""
    if not our_worker_serves():
        original(**call)


def commit(original: Callable[..., Any], **call: Any) -> None:
    """Around ``commit_gdn_replayssm_circular``: once a step, for all layers."""
    if not our_worker_serves():
        original(**call)
        return
    steps: Tensor | None = call["mamba_steps_to_track"]
    gdn_commit(
        call["checkpoint_state"],
        _records(call, "d_cache", "k_cache", "g_cache", "d_residual_cache", "k_residual_cache"),
        call["replay_indices"],
        call["state_batch_indices"],
        call["accept_lens"],
        None if steps is None else call["mamba_track_indices"],
        None if steps is None else steps + 1,
    )


def _records(call: dict[str, Any], *names: str) -> Records:
    return Records(*(call[name] for name in names))
