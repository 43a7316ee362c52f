"""Synthetic prompts: four tasks, train and held-out disjoint by construction, deterministic, licence-free."""

from __future__ import annotations

from sglang_dflash_lab.pairs.corpus.conversation import SHAPES, Conversation, Example, draw_conversation, split_of
from sglang_dflash_lab.pairs.corpus.prompts import TASKS, Prompt, check, draw, prompts

__all__ = [
    "SHAPES",
    "TASKS",
    "Conversation",
    "Example",
    "Prompt",
    "check",
    "draw",
    "draw_conversation",
    "prompts",
    "split_of",
]
