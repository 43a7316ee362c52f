"""A pair's figures on held-out prompts: accuracy of the target, accept lengths of the drafter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tqdm import tqdm

from sglang_dflash_lab.pairs.corpus import TASKS, Prompt, prompts
from sglang_dflash_lab.train.generate import answers_of
from sglang_dflash_lab.train.hf import load_model, load_tokenizer, transformers
from sglang_dflash_lab.train.reference_decoder import ReferenceDecoder

BLOCK_SIZES = (4, 8, 16)
MAX_NEW_TOKENS = 160
SEED = 1
LONG_SHARE = 3  # other prompts per ``document`` prompt (up to 1,500 tokens) of a task


def prompt_ids(tokenizer: transformers.PreTrainedTokenizerFast, prompt: Prompt) -> list[int]:
    text = tokenizer.apply_chat_template(list(prompt.messages), tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def measure_accuracy(target: Path, n: int, device: str = "cpu") -> dict[str, dict[str, Any]]:
    """Return per task the prompts and the share of correct answers: held-out, all shapes, greedy, fp32."""
    tokenizer, model = load_tokenizer(target), load_model(target, device=device)
    table: dict[str, dict[str, Any]] = {}
    for task in TASKS:
        asked = prompts(task, "heldout", n, SEED)
        ids = [prompt_ids(tokenizer, prompt) for prompt in asked]
        answers = answers_of(model, ids, MAX_NEW_TOKENS, batch_size=20)
        texts = [tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
        right = [prompt.check(text) for prompt, text in zip(asked, texts, strict=True)]
        table[task] = {"prompts": n, "correct": sum(right) / n}
    return table


def measure_accept_lengths(target: Path, drafter: Path, n: int, device: str = "cpu") -> dict[str, dict[str, Any]]:
    """Return per task the accept length by block size, the runs, and those that differ from plain decoding.

    Greedy, fp32, ``n`` prompts of all shapes and ``n // LONG_SHARE`` documents. Accept length: output tokens after the
    first over verify steps, pooled.
    """
    decoder = ReferenceDecoder.load(target, drafter, device=device)
    tokenizer = load_tokenizer(target)
    table: dict[str, dict[str, Any]] = {}
    for task in TASKS:
        asked = prompts(task, "heldout", n, SEED) + prompts(task, "heldout", n // LONG_SHARE, SEED, "document")
        tokens, steps = dict.fromkeys(BLOCK_SIZES, 0), dict.fromkeys(BLOCK_SIZES, 0)
        runs = differing = longest = 0
        for prompt in tqdm(asked, desc=f"accept lengths, {task}"):
            ids = prompt_ids(tokenizer, prompt)
            longest = max(longest, len(ids))
            plain = decoder.plain(ids, MAX_NEW_TOKENS)
            for block_size in BLOCK_SIZES:
                decoded = decoder.decode(ids, MAX_NEW_TOKENS, block_size)
                tokens[block_size] += len(decoded.tokens) - 1
                steps[block_size] += len(decoded.steps)
                runs += 1
                differing += decoded.tokens != plain
        table[task] = {
            "accept_length": {str(b): round(tokens[b] / steps[b], 2) for b in BLOCK_SIZES},
            "runs": runs,
            "differing_from_plain": differing,
            "longest_prompt": longest,
        }
    return table
