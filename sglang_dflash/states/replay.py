"""Our operations in place of SGLang's GDN replay kernels, while our worker serves.

SGLang's records are rings: an unfolded history with cursors, and a margin that depends on the block's width. Ours are
folded into the state at every commit. A block's records therefore begin at position 0 at any width, the cursors stay 0,
and nothing is left over for the ring's next owner to find.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from sglang_dflash.ops.dispatch import by_device
from sglang_dflash.plan import serving
from sglang_dflash.states import reference
from sglang_dflash.states.reference import Records

_KERNELS = "sglang_dflash.states.kernels"

gdn_verify = by_device(reference.gdn_verify, _KERNELS)
gdn_commit = by_device(reference.gdn_commit, _KERNELS)


def verify(original: Callable[..., Any], **call: Any) -> Any:
    """Hook around ``gdn_replayssm_spec_decode``: once per GDN layer, keywords only."""
    if serving.plan is None:
        return original(**call)
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
        _records(call, "d_cache", "k_cache", "g_cache", "rawv_cache", "rawk_cache"),
        call["replay_indices"],
        width=call["max_spec_len"],
        scale=call["scale"],
        out=call["out"],
    )


def advance(original: Callable[..., Any], **call: Any) -> None:
    """Hook around ``commit_gdn_replayssm_spec``, which moves the rings' cursors."""
    if serving.plan is None:
        original(**call)


def commit(original: Callable[..., Any], **call: Any) -> None:
    """Hook around ``commit_gdn_replayssm_circular``: once per step, for all layers."""
    if serving.plan is None:
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
