"""Server arguments that no DFLASH pair can be served with, whatever the pair.

``args`` in this folder is anything with SGLang's argument names as attributes, unset ones being None.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang_dflash.check.findings import Finding, judge
from sglang_dflash.errors import DFlashError
from sglang_dflash.plan.pair import asked_block

# Argument -> the least and the most that it may be: what is multiplied, divided by and allocated.
_LIMITS: dict[str, tuple[float, float]] = {
    "context_length": (1, 1 << 31),
    "linear_replayssm_cache_len": (1, 1 << 16),
    "mamba_full_memory_ratio": (1e-6, 1e6),
    "mamba_track_interval": (1, 1 << 31),
    "max_mamba_cache_size": (1, 1 << 31),
    "max_running_requests": (1, 1 << 20),
    "max_total_tokens": (1, 1 << 40),
    "mem_fraction_static": (1e-6, 1),
    "page_size": (1, 1 << 20),
    "pp_size": (1, 1 << 16),
    "speculative_dflash_block_size": (1, 1 << 12),
    "speculative_draft_window_size": (1, 1 << 31),
    "speculative_num_draft_tokens": (1, 1 << 12),
    "tp_size": (1, 1 << 16),
}
_NEEDED = ("linear_replayssm_cache_len", "pp_size", "tp_size")


def check_arguments(args: Any) -> Iterator[Finding]:
    """Findings on the arguments themselves; only the first, an error, if one is no number to compute with."""
    numbers = judge("numbers", _numbers, args)
    yield numbers
    if numbers.level == "error":
        return
    yield judge("drafter", _drafter_path, args)
    yield judge("block flags", _block_flags, args)
    yield judge("pipeline parallelism", _pipeline, args)
    yield judge("recurrent snapshots", _track_interval, args)


def _numbers(args: Any) -> str:
    for name, (least, most) in _LIMITS.items():
        value = getattr(args, name)
        if value is None and name not in _NEEDED:
            continue
        if not isinstance(value, int | float) or not least <= value <= most:
            flag = "--" + name.replace("_", "-")
            raise DFlashError(
                f"{flag} {value}",
                expected=f"a number from {least} to {most}",
                remedy=f"correct it, or leave {flag} out",
            )
    return "each within its limits"


def _drafter_path(args: Any) -> str:
    if args.speculative_draft_model_path:
        return str(args.speculative_draft_model_path)
    raise DFlashError(
        "--speculative-algorithm DFLASH without --speculative-draft-model-path",
        expected="the drafter's path or hub id",
        remedy="set --speculative-draft-model-path; the drafter's card names its target",
    )


def _block_flags(args: Any) -> str:
    tokens, block = args.speculative_num_draft_tokens, args.speculative_dflash_block_size
    if tokens is None or block is None or tokens == block:
        return str(tokens or block or "from the drafter")
    raise DFlashError(
        f"--speculative-num-draft-tokens {tokens} and --speculative-dflash-block-size {block}",
        expected="one value: both are the block size",
        remedy="keep one of the two flags",
    )


def _pipeline(args: Any) -> str:
    if args.pp_size == 1:
        return "1"
    raise DFlashError(
        f"--pp-size {args.pp_size}",
        expected="1: a draft needs hidden states of the whole target",
        remedy="use --tp-size instead",
    )


def _track_interval(args: Any) -> str:
    block, interval = asked_block(args), args.mamba_track_interval
    if block is None or interval is None or interval >= block:
        return f"every {interval} tokens"
    raise DFlashError(
        f"--mamba-track-interval {interval}, block size {block}",
        expected="at most one snapshot a block",
        remedy=f"set --mamba-track-interval to {block} or more; 256 is SGLang's default",
    )
