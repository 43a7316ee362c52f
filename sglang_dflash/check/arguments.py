"""Server arguments that no DFLASH pair can be served with, whatever the pair.

``args`` in this folder is anything with SGLang's argument names as attributes, unset ones being None.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang_dflash.check.findings import Finding, error, ok


def block_size(args: Any) -> int | None:
    """The block size that the flags ask for, tokens; None if they do not."""
    return args.speculative_num_draft_tokens or args.speculative_dflash_block_size


def check_arguments(args: Any) -> Iterator[Finding]:
    """Findings on the arguments themselves."""
    yield _drafter_path(args)
    yield _block_flags(args)
    yield _pipeline(args)
    yield _track_interval(args)


def _drafter_path(args: Any) -> Finding:
    about, path = "drafter", args.speculative_draft_model_path
    if path:
        return ok(about, str(path))
    return error(
        about,
        "--speculative-algorithm DFLASH without --speculative-draft-model-path",
        expected="the drafter's path or hub id",
        remedy="set --speculative-draft-model-path; the drafter's card names its target",
    )


def _block_flags(args: Any) -> Finding:
    about = "block flags"
    tokens, block = args.speculative_num_draft_tokens, args.speculative_dflash_block_size
    if tokens is None or block is None or tokens == block:
        return ok(about, str(tokens or block or "from the drafter"))
    return error(
        about,
        f"--speculative-num-draft-tokens {tokens} and --speculative-dflash-block-size {block}",
        expected="one value: both are the block size",
        remedy="keep one of the two flags",
    )


def _pipeline(args: Any) -> Finding:
    about = "pipeline parallelism"
    if args.pp_size == 1:
        return ok(about, "1")
    return error(
        about,
        f"--pp-size {args.pp_size}",
        expected="1: a draft needs hidden states of the whole target",
        remedy="use --tp-size instead",
    )


def _track_interval(args: Any) -> Finding:
    about, block, interval = "recurrent snapshots", block_size(args), args.mamba_track_interval
    if block is None or interval is None or interval >= block:
        return ok(about, f"every {interval} tokens")
    return error(
        about,
        f"--mamba-track-interval {interval}, block size {block}",
        expected="at most one snapshot a block",
        remedy=f"set --mamba-track-interval to {block} or more; 256 is SGLang's default",
    )
