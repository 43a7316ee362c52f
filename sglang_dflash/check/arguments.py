"""Server arguments that no DFLASH pair can be served with, whatever the pair.

``args`` in this folder is anything with SGLang's argument names as attributes, unset ones being None.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang_dflash.check.findings import Finding, judge
from sglang_dflash.errors import DFlashError


def block_size(args: Any) -> int | None:
    """The block size that the flags ask for, tokens; None if they do not."""
    return args.speculative_num_draft_tokens or args.speculative_dflash_block_size


def check_arguments(args: Any) -> Iterator[Finding]:
    """Findings on the arguments themselves."""
    yield judge("drafter", _drafter_path, args)
    yield judge("block flags", _block_flags, args)
    yield judge("pipeline parallelism", _pipeline, args)
    yield judge("recurrent snapshots", _track_interval, args)


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
    block, interval = block_size(args), args.mamba_track_interval
    if block is None or interval is None or interval >= block:
        return f"every {interval} tokens"
    raise DFlashError(
        f"--mamba-track-interval {interval}, block size {block}",
        expected="at most one snapshot a block",
        remedy=f"set --mamba-track-interval to {block} or more; 256 is SGLang's default",
    )
