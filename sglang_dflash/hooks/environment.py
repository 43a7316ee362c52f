"""The published cards' environment variables: what each does in this SGLang."""

from __future__ import annotations

import os
from collections.abc import Mapping

_ON = {"1", "true", "yes", "on", "y", "t"}
_OVERLAP = (
    "is not needed: overlap scheduling is the default",
    "has no effect: one worker serves with and without overlap; "
    "to schedule without overlap, add --disable-overlap-schedule",
)
_PLAN_STREAM = "means what it meant: SGLang reads it"
_LONGER_CONTEXT = "is not needed for the drafter's context; it still lifts the target's own limit"
# variable -> what it does if it is on, and if it is off
_VARIABLES = {
    "SGLANG_ENABLE_SPEC_V2": _OVERLAP,
    "SGLANG_ENABLE_DFLASH_SPEC_V2": _OVERLAP,
    "SGLANG_ENABLE_OVERLAP_PLAN_STREAM": (_PLAN_STREAM, _PLAN_STREAM),
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": (_LONGER_CONTEXT, _LONGER_CONTEXT),
}


def explain_environment(environ: Mapping[str, str] = os.environ) -> list[str]:
    """One line for each variable of the cards that is set."""
    return [
        f"{name}={value} {on if value.strip().lower() in _ON else off}"
        for name, (on, off) in _VARIABLES.items()
        if (value := environ.get(name)) is not None
    ]
