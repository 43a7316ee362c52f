"""Batched answers of a target, for drafter training and accuracy."""

from __future__ import annotations

from pathlib import Path
from random import Random

import torch
from tqdm import tqdm

from sglang_dflash_lab.train.hf import load_model, load_tokenizer, transformers
from sglang_dflash_lab.train.rows import Weighted, training_conversation

CONVERSATIONS = 4500

Chat = list[dict[str, str]]


@torch.inference_mode()
def answers_of(
    model: transformers.PreTrainedModel,
    prompts: list[list[int]],
    max_new_tokens: int = 200,
    batch_size: int = 96,
    *,
    sampled: bool = False,
) -> list[list[int]]:
    """Return the continuation of each prompt (token ids), up to and including the end token.

    Args:
        max_new_tokens: longest continuation, tokens.
        sampled: draw at temperature 1; otherwise greedy.
    """
    eos, pad = model.config.eos_token_id, model.config.pad_token_id
    by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    answers: list[list[int]] = [[] for _ in prompts]
    for first in tqdm(range(0, len(prompts), batch_size), desc="target's answers"):
        batch = by_length[first : first + batch_size]
        width = len(prompts[batch[-1]])
        padding = [width - len(prompts[i]) for i in batch]
        out = model.generate(
            torch.tensor([[pad] * n + prompts[i] for i, n in zip(batch, padding, strict=True)], device=model.device),
            attention_mask=torch.tensor([[0] * n + [1] * (width - n) for n in padding], device=model.device),
            max_new_tokens=max_new_tokens,
            do_sample=sampled,
            **({"temperature": 1.0, "top_p": 1.0, "top_k": 0} if sampled else {}),
            repetition_penalty=1.0,  # overrides the target's generation_config
            eos_token_id=eos,
            pad_token_id=pad,
        )
        for i, tokens in zip(batch, out[:, width:].tolist(), strict=True):
            answers[i] = tokens[: tokens.index(eos) + 1] if eos in tokens else tokens
    return answers


def corpus_prompts(seed: int, n: int = CONVERSATIONS) -> list[tuple[Chat, bool]]:
    """Return chats of the train split, each with its thinking switch."""
    rng = Random(f"drafter/{seed}")
    drawn = (training_conversation(rng, rng.choices((256, 2048), (0.8, 0.2))[0]) for _ in range(n))
    return [(conversation.messages(), conversation.thinking) for conversation in drawn]


def target_output(
    target_folder: Path, chats: list[tuple[Chat, bool]], device: str, *, sampled: bool = False
) -> list[Weighted]:
    """Return the chats with the target's greedy or sampled answers as token ids, weight 1.0 on answers."""
    tokenizer = load_tokenizer(target_folder)
    texts = [
        tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, enable_thinking=thinking)
        for chat, thinking in chats
    ]
    prompts = tokenizer(texts, add_special_tokens=False)["input_ids"]
    answers = answers_of(load_model(target_folder, torch.bfloat16, device), prompts, sampled=sampled)
    return [
        (prompt + answer, [0.0] * len(prompt) + [1.0] * len(answer))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
