"""Conversations as token rows: encoding, loss weights and packing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from random import Random

import torch
from torch import Tensor

from sglang_dflash_lab.pairs.corpus import SHAPES, Conversation, Example, draw, draw_conversation
from sglang_dflash_lab.train.drills import draw_sums, draw_words
from sglang_dflash_lab.train.hf import transformers

_TRAINING_ONLY = {"drill": draw_words, "sums": draw_sums}
BALANCED = {"math": 0.30, "code": 0.16, "json": 0.34, "chat": 0.20}
# More copying, which is learned late.
COPYING = {"math": 0.15, "code": 0.08, "json": 0.27, "chat": 0.22, "drill": 0.28}
# More sums: carrying and borrowing are learned last.
ARITHMETIC = {"math": 0.36, "code": 0.08, "json": 0.18, "chat": 0.14, "drill": 0.04, "sums": 0.20}
EVEN = {"math": 0.25, "code": 0.25, "json": 0.25, "chat": 0.25}
THINKING_SHARE = 0.12
PROMPT_WEIGHT = 0.1  # small, because questions have few learnable tokens
IGNORE = 0.0

Weighted = tuple[list[int], list[float]]


class ConversationEncoder:
    def __init__(self, tokenizer: transformers.PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self.pad = int(tokenizer.pad_token_id)

    def encode(self, conversation: Conversation) -> Weighted:
        """Return ids and weights (1.0 on answers, else ``PROMPT_WEIGHT``) up to the last ``<|im_end|>``."""
        pieces: list[tuple[str, float]] = []
        for message in conversation.messages():
            answered = message["role"] == "assistant"
            pieces.append((f"<|im_start|>{message['role']}\n", PROMPT_WEIGHT))
            pieces.append((f"{message['content']}<|im_end|>", 1.0 if answered else PROMPT_WEIGHT))
            pieces.append(("\n", PROMPT_WEIGHT))
        last = conversation.turns[-1]
        pieces.append(("<|im_start|>assistant\n<think>\n", PROMPT_WEIGHT))
        if conversation.thinking:
            pieces.append((f"{last.thought}\n</think>\n\n{last.answer}<|im_end|>", 1.0))
        else:
            pieces += [("\n</think>\n\n", PROMPT_WEIGHT), (f"{last.answer}<|im_end|>", 1.0)]
        encoded = self._tokenizer([text for text, _ in pieces], add_special_tokens=False)["input_ids"]
        weights = [weight for tokens, (_, weight) in zip(encoded, pieces, strict=True) for _ in tokens]
        return list(chain.from_iterable(encoded)), weights


def training_conversation(
    rng: Random, row_length: int, task_weights: dict[str, float] = BALANCED, *, forks: bool = False
) -> Conversation:
    """Return a random conversation. ``forks``: each answer is that of another question of its task, so that many
    continuations are about equally likely."""
    shape = rng.choices(SHAPES, (0.70, 0.12, 0.18) if row_length >= 1024 else (0.90, 0.10, 0.0))[0]
    tasks, weights = tuple(task_weights), tuple(task_weights.values())
    return draw_conversation(
        rng, shape, lambda: _draw(rng.choices(tasks, weights)[0], rng, forks), rng.random() < THINKING_SHARE
    )


def _draw(task: str, rng: Random, forks: bool) -> Example:
    example = _draw_one(task, rng)
    return replace(example, answer=_draw_one(task, rng).answer) if forks else example


def _draw_one(task: str, rng: Random) -> Example:
    drawn = _TRAINING_ONLY.get(task)
    while True:
        example = draw(task, "train", rng) if drawn is None else drawn(rng)
        if example.split == "train":
            return example


def pack(items: list[Weighted], length: int, pad: int) -> tuple[Tensor, Tensor]:
    """Pack items first-fit; drop items longer than a row.

    Returns:
        ids int64 [rows, length] and weights float32 [rows, length], 0 on padding.
    """
    rows: list[Weighted] = []
    open_rows: list[int] = []
    for ids, weights in items:
        if len(ids) > length:
            continue
        row = next((r for r in open_rows if len(rows[r][0]) + len(ids) <= length), None)
        if row is None:
            row = len(rows)
            rows.append(([], []))
            open_rows = [*open_rows[-7:], row]
        rows[row][0].extend(ids)
        rows[row][1].extend(weights)
    packed_ids = torch.tensor([ids + [pad] * (length - len(ids)) for ids, _ in rows])
    packed_weights = torch.tensor([weights + [IGNORE] * (length - len(weights)) for _, weights in rows])
    packed_weights[:, 0] = IGNORE
    return packed_ids, packed_weights


def packed_rows(
    next_item: Callable[[], Weighted], rows: int, length: int, pad: int, spare: int
) -> tuple[Tensor, Tensor]:
    """Return packed ``rows`` of ``length`` tokens from items that would fill ``spare`` more; see :func:`pack`."""
    items: list[Weighted] = []
    tokens = 0
    while tokens < (rows + spare) * length:
        items.append(next_item())
        size = len(items[-1][0])
        tokens += size if size <= length else 0
    ids, weights = pack(items, length, pad)
    return ids[:rows], weights[:rows]


def training_rows(
    encoder: ConversationEncoder,
    rng: Random,
    rows: int,
    length: int,
    task_weights: dict[str, float] = BALANCED,
    *,
    forks: bool = False,
) -> tuple[Tensor, Tensor]:
    def next_item() -> Weighted:
        return encoder.encode(training_conversation(rng, length, task_weights, forks=forks))

    return packed_rows(next_item, rows, length, encoder.pad, spare=8)
