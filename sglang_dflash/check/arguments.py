"""Server arguments that no DFLASH pair can be served with, whatever the pair."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang_dflash.check.findings import Finding, error, ok
from sglang_dflash.check.pair import Serving


def serving_of(args: Any) -> Serving:
    """The arguments that a pair has to fit, from anything with SGLang's argument names as attributes."""
    return Serving(
        block_size=args.speculative_num_draft_tokens or args.speculative_dflash_block_size,
        context_length=args.context_length,
        draft_window=args.speculative_draft_window_size,
        tp_size=args.tp_size,
    )


def check_arguments(args: Any) -> Iterator[Finding]:
    """Findings on the arguments themselves.

    Args:
        args: anything with SGLang's argument names as attributes.
    """
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
    about, block = "recurrent snapshots", serving_of(args).block_size
    interval = args.mamba_track_interval
    if block is None or interval is None or interval >= block:
        return ok(about, f"every {interval} tokens")
    return error(
        about,
        f"--mamba-track-interval {interval}, block size {block}",
        expected="at most one snapshot a block",
        remedy=f"set --mamba-track-interval to {block} or more; 256 is SGLang's default",
    )
