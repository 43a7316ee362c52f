"""Mode ``oracle``: random drafters that guess right, so that blocks of every accept length are committed.

From the moment that ``answers.json`` exists in ``SGLANG_DFLASH_TEST_FOLDER``, some drafts of each block are the
answer's next tokens; how many changes between blocks. The file is a list of prompts with their answers, or, for prompts
with images, whose tokens only the server knows, the answers by request id (what follows a slash is no part of it).
"""

from __future__ import annotations

import json
import os
import random
from functools import cache
from pathlib import Path
from typing import Any

import torch

ANSWERS = Path(os.environ.get("SGLANG_DFLASH_TEST_FOLDER", ".")) / "answers.json"


def know_answers(_: None, draft: Any, step: Any) -> None:
    """Put the answer's tokens into the block after the anchor, which stands at the committed length."""
    if not ANSWERS.exists():
        return
    step.tokens = step.tokens.clone()
    for block, req, anchor in zip(step.tokens, step.batch.reqs, step.batch.seq_lens.tolist(), strict=True):
        right = random.Random(anchor).randrange(len(block))
        known = tokens_after(req, anchor)[:right]
        block[1 : 1 + len(known)] = torch.tensor(known, dtype=block.dtype)


def tokens_after(req: Any, anchor: int) -> list[int]:
    """What follows the token at position ``anchor`` of a request; nothing if its answer is not known."""
    known, prompt = answers(), list(req.origin_input_ids)
    if isinstance(known, dict):
        return known.get(req.rid.partition("/")[0], [])[anchor - len(prompt) + 1 :]
    return next(answer for answer in known if answer[: len(prompt)] == prompt)[anchor + 1 :]


@cache
def answers() -> list[list[int]] | dict[str, list[int]]:
    known: list[list[int]] | dict[str, list[int]] = json.loads(ANSWERS.read_text())
    return known
