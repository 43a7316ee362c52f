"""Decide who serves DFLASH, and make the serving plan.

The process that is started decides, and writes its choices into SGLang's arguments (:mod:`sglang_dflash.hooks.launch`).
The processes that it starts read the plan back from there, so all of them serve the same one.
"""

from __future__ import annotations

import os
from typing import Any

from sglang_dflash.drafter.config import DrafterConfig
from sglang_dflash.drafter.dequantise import is_set_aside
from sglang_dflash.drafter.formats import kind_left_to_builtin
from sglang_dflash.errors import DFlashError
from sglang_dflash.plan.copies import copies_asked_for
from sglang_dflash.plan.machine import Machine
from sglang_dflash.plan.memory import expected_memory
from sglang_dflash.plan.pair import Pair, block_size, drafter_files, page_size, read_pair
from sglang_dflash.plan.replay import asked_for as replay_asked_for
from sglang_dflash.plan.replay import is_replayed, record_length
from sglang_dflash.plan.serving import ServingPlan
from sglang_dflash.plan.window import DraftWindow, context_window
from sglang_dflash.width.config import FLAG, WidthConfig
from sglang_dflash.width.config import asked_for as widths_asked_for

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
    """Return the reason, for the log, that leaves DFLASH to SGLang's own worker; None if ours serves it.

    Args:
        args: server arguments by SGLang's names; the device must be known.
        on_cpu: whether our CPU platform serves.

    Raises:
        DFlashError: the switch holds an unknown word, DP attention or the megakernel is asked for, or SGLang's worker
            would have to serve on the CPU platform, which has none.
    """
    if builtin_requested():
        return f"{SWITCH}=builtin"
    reason = _not_ours(args, on_cpu)
    if reason is None:
        _refuse_dp_attention(args, on_cpu)
        _refuse_megakernel(args)
    elif is_set_aside(drafter_files(args).published):
        raise DFlashError(
            f"{reason}, with a quantised drafter",
            expected="this package's worker, which dequantises it",
            remedy=f"use the drafter's plain weights, or {SWITCH}=builtin for SGLang's own worker and layers",
        )
    elif on_cpu:
        raise DFlashError(
            f"{reason}, on the CPU platform",
            expected="a plain DFlash drafter without this option",
            remedy="serve this pair on a GPU, where SGLang's own worker takes it",
        )
    return reason


def _refuse_dp_attention(args: Any, on_cpu: bool) -> None:
    """Refuse on a GPU too, instead of silently leaving it to SGLang's worker: its ranks serve different requests."""
    groups = args.attn_dp_size
    if args.enable_dp_attention and groups == 1:  # the old spelling, which SGLang resolves to the new one
        groups = args.dp_size
    if groups <= 1:
        return
    builtin = "" if on_cpu else f"{SWITCH}=builtin for SGLang's own worker, or "
    raise DFlashError(
        f"DP attention over {groups} groups of ranks",
        expected="ranks that serve one batch (--tp-size), or replicas (--dp-size without --enable-dp-attention)",
        remedy=f"{builtin}leave --attn-dp-size and --enable-dp-attention out",
    )


def _refuse_megakernel(args: Any) -> None:
    if args.enable_nvidia_megakernel:
        raise DFlashError(
            "--enable-nvidia-megakernel replaces the forward pass of decode and verify steps",
            expected="the target's own forward pass, which this package captures in CUDA graphs",
            remedy=f"{SWITCH}=builtin for SGLang's own worker, or leave --enable-nvidia-megakernel out",
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


def decide(args: Any, machine: Machine, *, hybrid: bool) -> ServingPlan:
    """Decide everything that is left open, for a pair that our worker serves.

    Args:
        args: server arguments by SGLang's names, before SGLang has resolved speculation.
        machine: what will serve.
        hybrid: whether the target has gated-delta-net layers.

    Raises:
        DFlashError: the arguments ask for widths or a state replay that cannot be served.
    """
    pair = read_pair(args)
    block = block_size(args, pair.drafter)
    widths = _widths(args, block)
    asked = replay_asked_for(args) if hybrid else None
    copies, memory, unsized = _copies(args, widths), None, None
    try:
        served = widths.widths_for(block, pair.drafter.block_size) if widths else (block,)
        memory = expected_memory(args, machine, pair, asked, served, copies=copies)
    except DFlashError as error:  # SGLang divides the memory, and may know better
        unsized = error
    if memory is not None:
        replay = memory.ways[0].replay
    else:
        replay = hybrid and is_replayed(args, machine, asked, lets_more_run=False)
    overlap = not args.disable_overlap_schedule and not (hybrid and _resumes_retracted(args))
    return _plan(args, pair, block, widths, replay=replay, overlap=overlap, memory=memory, unsized=unsized)


def resolved(args: Any, given: Any) -> ServingPlan:
    """Read the plan back in a process that the launching one started.

    Args:
        args: SGLang's view of the resolved arguments.
        given: the arguments as the user gave them. SGLang's own ``--speculative-adaptive`` is resolved to off.
    """
    pair = read_pair(args)
    return _plan(
        args,
        pair,
        block_size(args, pair.drafter),
        widths_asked_for(given),
        replay=args.enable_linear_replayssm_spec,
        overlap=not args.disable_overlap_schedule,
    )


def _plan(
    args: Any, pair: Pair, block: int, widths: WidthConfig | None, *, replay: bool, **decided: Any
) -> ServingPlan:
    return ServingPlan(
        files=pair.drafter_files,
        drafter=pair.drafter,
        block=block,
        widths=widths,
        window=_window(args, pair.drafter, block),
        replay=replay,
        records=record_length(args, block) if replay else 0,
        copies=_copies(args, widths),
        role=args.disaggregation_mode,
        **decided,
    )


def _widths(args: Any, block: int) -> WidthConfig | None:
    widths = widths_asked_for(args)
    if widths is None and args.speculative_adaptive_config is not None:
        raise DFlashError(
            f"{FLAG} {args.speculative_adaptive_config} without --speculative-adaptive",
            expected="both, or neither",
            remedy="add --speculative-adaptive, or leave the file out",
        )
    if widths is not None:
        widths.widths_for(block)  # refuses a width wider than the block
    return widths


def _copies(args: Any, widths: WidthConfig | None) -> bool:
    return copies_asked_for(widths) and args.disaggregation_mode != "prefill"  # which decodes nothing


def _window(args: Any, drafter: DrafterConfig, block: int) -> DraftWindow | None:
    tokens = context_window(args.speculative_draft_window_size, drafter)
    return None if tokens is None else DraftWindow(tokens, block, page_size(args))


def _resumes_retracted(args: Any) -> bool:
    """Whether a decoding server would resume a retracted hybrid request from a state ahead of its tokens.

    At a retraction SGLang drops the step in flight but keeps the recurrent state that the step has advanced. K/V are
    written again, a state is not. Without overlap no step is in flight.
    """
    return args.disaggregation_mode == "decode" and args.disaggregation_decode_retraction_backup != "none"
