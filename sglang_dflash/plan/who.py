"""Who serves ``--speculative-algorithm DFLASH``: our worker, unless something leaves it to SGLang's own."""

from __future__ import annotations

import os
from typing import Any

from sglang_dflash.drafter.kinds import kind_left_to_builtin
from sglang_dflash.errors import DFlashError
from sglang_dflash.plan.pair import drafter_files

SWITCH = "SGLANG_DFLASH"


def builtin_requested() -> bool:
    """Whether the user asked for SGLang's own worker.

    Raises:
        DFlashError: the switch holds an unknown word.
    """
    value = os.environ.get(SWITCH, "")
    if value not in ("", "builtin"):
        raise DFlashError(f"{SWITCH}={value!r}", expected="builtin, or unset", remedy=f"unset {SWITCH}")
    return value == "builtin"


def reason_for_builtin(args: Any, *, on_cpu: bool) -> str | None:
    """Why SGLang's own worker must serve DFLASH, in words for the log; None if ours does.

    Args:
        args: SGLang's view of the resolved arguments; device and parallelism must be known.
        on_cpu: whether our CPU platform serves.

    Raises:
        DFlashError: the switch holds an unknown word, DP attention is asked for, or SGLang's worker would have to serve
            on the CPU platform, which has none.
    """
    if builtin_requested():
        return f"{SWITCH}=builtin"
    reason = _not_ours(args, on_cpu)
    if reason is None:
        _refuse_dp_attention(args, on_cpu)
    elif on_cpu:
        raise DFlashError(
            f"{reason}, on the CPU platform",
            expected="a plain DFlash drafter without this option",
            remedy="serve this pair on a GPU, where SGLang's own worker takes it",
        )
    return reason


def _refuse_dp_attention(args: Any, on_cpu: bool) -> None:
    """Refuse on a GPU too, instead of silently leaving it to SGLang's worker: its ranks serve different requests."""
    if args.attn_dp_size <= 1:
        return
    builtin = "" if on_cpu else f"{SWITCH}=builtin for SGLang's own worker, or "
    raise DFlashError(
        f"DP attention over {args.attn_dp_size} groups of ranks",
        expected="ranks that serve one batch (--tp-size), or replicas (--dp-size without --enable-dp-attention)",
        remedy=f"{builtin}leave --enable-dp-attention out",
    )


def _not_ours(args: Any, on_cpu: bool) -> str | None:
    reasons = (
        (kind := kind_left_to_builtin(drafter_files(args).config), f"the drafter is of the kind {kind}"),
        (not args.device.startswith("cuda") and not on_cpu, f"the device is {args.device}"),
        (args.attn_cp_size > 1, "context parallelism is used"),
        (args.enable_watermark, "--enable-watermark is used"),
        (args.speculative_accept_threshold_single != 1.0, "--speculative-accept-threshold-single is not lossless"),
        (args.speculative_accept_threshold_acc != 1.0, "--speculative-accept-threshold-acc is not lossless"),
    )
    return next((reason for applies, reason in reasons if applies), None)
