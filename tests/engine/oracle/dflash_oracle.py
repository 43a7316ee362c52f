"""An SGLang plugin for tests: random drafters that guess right, so that blocks of every accept length are committed.

A server finds it when this folder is on PYTHONPATH. From the moment that the file DFLASH_ORACLE exists, a JSON list of
prompts with their answers, some drafts of each block are the answer's next tokens; how many changes between blocks.
"""

from __future__ import annotations

import json
import os
import random
from functools import cache
from pathlib import Path
from typing import Any

import torch

ANSWERS = Path(os.environ["DFLASH_ORACLE"])


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang_dflash.worker.draft.Drafting.__call__", know_answers, HookType.AFTER)


def know_answers(tokens: torch.Tensor, _: Any, batch: Any, *__: Any) -> torch.Tensor | None:
    """The block ``[bs, w]`` with the answer's tokens behind the anchor, which stands at the committed length."""
    if not ANSWERS.exists():
        return None
    block = tokens.clone()
    for row, (req, anchor) in enumerate(zip(batch.reqs, batch.seq_lens.tolist(), strict=True)):
        right = random.Random(anchor).randrange(block.shape[1])
        answer = next(a for a in answers() if a[: len(req.origin_input_ids)] == list(req.origin_input_ids))
        known = answer[anchor + 1 : anchor + 1 + right]
        block[row, 1 : 1 + len(known)] = torch.tensor(known, dtype=block.dtype)
    return block


@cache
def answers() -> list[list[int]]:
    known: list[list[int]] = json.loads(ANSWERS.read_text())
    return known
