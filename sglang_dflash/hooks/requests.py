"""Requests that ask for something DFLASH cannot return: refused by name, never answered without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dflash.drafter.served import our_worker_serves
from sglang_dflash.errors import DFlashError

_REASONS = {
    "return_hidden_states": "a block's hidden states feed the drafter and are not kept per output token",
    "return_sampling_mask": "the sets that filters leave are not kept per block position",
}


def refuse_request(original: Callable[[Any, bool], str | None], req: Any, enable_overlap: bool) -> str | None:
    """Around SGLang's check of a request under DFLASH: the error for the client, or None."""
    if not our_worker_serves():
        return original(req, enable_overlap)
    for feature, reason in _REASONS.items():
        if getattr(req, feature):
            return str(
                DFlashError(
                    f"{feature} is not available under DFLASH: {reason}",
                    expected=f"a request without {feature}",
                    remedy="send it to a server without --speculative-algorithm",
                )
            )
    return None
