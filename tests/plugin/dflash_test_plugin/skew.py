"""What one tensor-parallel rank gets wrong: everything after rank 0 is skewed, and each writes down what it did."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(os.environ.get("SGLANG_DFLASH_TEST_FOLDER", "."))


def rank() -> int:
    from sglang_dflash.upstream import get_parallel

    return int(get_parallel().tp_rank)


def hidden_states(_: Any, hidden: torch.Tensor, **__: Any) -> None:
    """Mode ``skew``, before the drafter's head: noise, so that this rank's best token is another."""
    if rank():
        hidden.add_(torch.randn_like(hidden), alpha=float(hidden.std()))


def logits(accept: Any, step: Any) -> None:
    """The same mode, before the target's tokens are chosen: any token may win."""
    if rank():
        step.verified.logits_output.next_token_logits.normal_()


def times(records: Any, *_: Any) -> Any:
    """The same mode, after steps were timed: this rank is a hundred times slower."""
    for record in records if rank() else ():
        record.milliseconds *= 100.0
    return records


def write(_: None, commit: Any, step: Any) -> None:
    """The same mode, after the commit: one line a step."""
    tokens = {"block": step.tokens.tolist(), "committed": step.accepted.out_tokens.tolist()}
    with (FOLDER / f"rank-{rank()}.jsonl").open("a") as file:
        file.write(json.dumps({"width": step.width, "requests": [req.rid for req in step.batch.reqs], **tokens}) + "\n")


def accept_lens(policy: Any, width: int, lens: Any, *_: Any) -> None:
    """Mode ``skew_policy``, before a policy learns: this rank hears of no accepted draft."""
    if rank():
        lens[:] = [1] * len(lens)
