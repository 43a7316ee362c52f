"""Synthetic prompts: four tasks, train and held-out disjoint by construction, deterministic, licence-free."""

from __future__ import annotations

from sglang_dflash.pairs.corpus.conversation import SHAPES, Conversation, draw_conversation
from sglang_dflash.pairs.corpus.example import Example, split_of
from sglang_dflash.pairs.corpus.prompts import TASKS, Prompt, check, draw, prompts

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
