"""Conversations as token rows: encoding that equals the chat template, loss weights, and packing."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from sglang_dflash.pairs.corpus import SHAPES, Conversation, draw, draw_conversation

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

BALANCED = {"math": 0.30, "code": 0.16, "json": 0.34, "chat": 0.20}
COPYING = {
    "math": 0.15,
    "code": 0.08,
    "json": 0.27,
    "chat": 0.22,
    "drill": 0.28,
}  # what is learned late: to copy a question's words
ARITHMETIC = {
    "math": 0.36,
    "code": 0.08,
    "json": 0.18,
    "chat": 0.14,
    "drill": 0.04,
    "sums": 0.20,
}  # what is learned last: to carry and to borrow
EVEN = {"math": 0.25, "code": 0.25, "json": 0.25, "chat": 0.25}
THINKING_SHARE = 0.12
PROMPT_WEIGHT = 0.1  # questions carry few learnable bits, but some: names and numbers are copied from them
IGNORE = 0.0

Weighted = tuple[list[int], list[float]]


class ConversationEncoder:
    """Token ids and loss weights of a conversation, equal to what the chat template renders."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self.pad = int(tokenizer.pad_token_id)

    def encode(self, conversation: Conversation) -> Weighted:
        """-> ids and weights, 1.0 on answers, `PROMPT_WEIGHT` elsewhere, up to the last `<|im_end|>`."""
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
        ids: list[int] = []
        weights: list[float] = []
        encoded = self._tokenizer([text for text, _ in pieces], add_special_tokens=False)["input_ids"]
        for tokens, (_, weight) in zip(encoded, pieces, strict=True):
            ids += tokens
            weights += [weight] * len(tokens)
        return ids, weights


def training_conversation(rng: Random, row_length: int, task_weights: dict[str, float] = BALANCED) -> Conversation:
    """A training conversation; long documents only where a row of `row_length` tokens has room for them."""
    shape = rng.choices(SHAPES, (0.70, 0.12, 0.18) if row_length >= 1024 else (0.90, 0.10, 0.0))[0]
    tasks, weights = tuple(task_weights), tuple(task_weights.values())
    return draw_conversation(
        rng, shape, lambda: draw(rng.choices(tasks, weights)[0], "train", rng), rng.random() < THINKING_SHARE
    )


def pack(items: list[Weighted], length: int, pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """First-fit packing, every row starting with a fresh item; items longer than a row are dropped.

    Several conversations in a row are what a long chat looks like, so long rows also teach long prompts.

    Returns:
        ids int64 [rows, length] and weights float32 [rows, length], 0 on padding.
    """
    import torch

    rows: list[Weighted] = []
    open_rows: list[int] = []
    for ids, weights in items:
        if len(ids) > length:
            continue
        fits = next((r for r in open_rows if len(rows[r][0]) + len(ids) <= length), None)
        if fits is None:
            rows.append(([], []))
            open_rows = [*open_rows[-7:], len(rows) - 1]
            fits = open_rows[-1]
        rows[fits][0].extend(ids)
        rows[fits][1].extend(weights)
    packed_ids = torch.full((len(rows), length), pad, dtype=torch.int64)
    packed_weights = torch.full((len(rows), length), IGNORE)
    for r, (ids, weights) in enumerate(rows):
        packed_ids[r, : len(ids)] = torch.tensor(ids)
        packed_weights[r, : len(ids)] = torch.tensor(weights)
    packed_weights[:, 0] = IGNORE
    return packed_ids, packed_weights


def training_rows(
    encoder: ConversationEncoder,
    rng: Random,
    rows: int,
    length: int,
    task_weights: dict[str, float] = BALANCED,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rows` packed rows of `length` tokens of fresh training conversations; see `pack`."""
    items: list[Weighted] = []
    tokens = 0
    while tokens < (rows + 8) * length:
        item = encoder.encode(training_conversation(rng, length, task_weights))
        items.append(item)
        tokens += len(item[0]) if len(item[0]) <= length else 0
    ids, weights = pack(items, length, encoder.pad)
    return ids[:rows], weights[:rows]
