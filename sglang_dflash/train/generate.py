"""Greedy answers of a target to many prompts at once: training data for drafters, and accuracy."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sglang_dflash.train.hf import transformers

COMPACT_EVERY = 16


@torch.inference_mode()
def greedy_answers(
    model: transformers.PreTrainedModel,
    prompts: list[list[int]],
    max_new_tokens: int = 200,
    batch_size: int = 96,
    progress: Callable[[int], object] = lambda done: None,
) -> list[list[int]]:
    """The greedy continuation of each prompt, in their order, up to and including the end token."""
    by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    answers: list[list[int]] = [[] for _ in prompts]
    for first in range(0, len(by_length), batch_size):
        batch = by_length[first : first + batch_size]
        for i, answer in zip(batch, _greedy_batch(model, [prompts[i] for i in batch], max_new_tokens), strict=True):
            answers[i] = answer
        progress(len(batch))
    return answers


def _greedy_batch(
    model: transformers.PreTrainedModel, prompts: list[list[int]], max_new_tokens: int
) -> list[list[int]]:
    """One left-padded batch; finished rows leave it now and then."""
    eos, pad, device = model.config.eos_token_id, model.config.pad_token_id, model.device
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=device)
    attention = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    out = model(input_ids=ids, attention_mask=attention, position_ids=positions, use_cache=True, logits_to_keep=1)
    cache, position = out.past_key_values, positions[:, -1:]
    rows = torch.arange(len(prompts), device=device)
    done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    answers: list[list[int]] = [[] for _ in prompts]
    for step in range(max_new_tokens):
        token: Tensor = out.logits[:, -1].argmax(-1)
        for row, value, finished in zip(rows.tolist(), token.tolist(), done.tolist(), strict=True):
            if not finished:
                answers[row].append(value)
        done |= token == eos
        if done.all():
            break
        if step % COMPACT_EVERY == COMPACT_EVERY - 1 and done.any():
            keep = (~done).nonzero().flatten()
            cache.reorder_cache(keep)
            rows, token, position, attention, done = (x[keep] for x in (rows, token, position, attention, done))
        position = position + 1
        attention = torch.cat((attention, attention.new_ones(len(rows), 1)), dim=1)
        out = model(
            input_ids=token[:, None],
            attention_mask=attention,
            position_ids=position,
            past_key_values=cache,
            use_cache=True,
        )
    return answers
