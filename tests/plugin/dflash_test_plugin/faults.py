"""Faults, while a file of their name lies in ``SGLANG_DFLASH_TEST_FOLDER``: numbers that are none."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(os.environ.get("SGLANG_DFLASH_TEST_FOLDER", "."))
CONTEXT, DRAFTS, TARGET = "nan_context", "nan_drafts", "nan_target"


def spoil_context(result: tuple[torch.Tensor, torch.Tensor], *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Mode ``faults``: the drafter's context K/V of whatever is injected."""
    if (FOLDER / CONTEXT).exists():
        for part in result:
            part.fill_(torch.nan)
    return result


def spoil_drafter(model: Any, *_: Any) -> None:
    """The same mode: the drafter's last norm, until the file is gone."""
    weight, kept = model.norm.weight, getattr(model, "kept_norm", None)
    if (FOLDER / DRAFTS).exists():
        if kept is None:
            model.kept_norm = weight.data.clone()
        weight.data.fill_(torch.nan)
    elif kept is not None:
        weight.data.copy_(kept)
        del model.kept_norm


def spoil_target(_: None, verify: Any, step: Any) -> None:
    """The same mode: the target's logits of the request whose id is in the file."""
    file = FOLDER / TARGET
    if file.exists():
        rid = file.read_text()
        for row, req in enumerate(step.batch.reqs):
            if req.rid == rid:
                step.verified.logits_output.next_token_logits.unflatten(0, (-1, step.width))[row] = torch.nan
