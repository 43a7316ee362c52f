"""Prompts as token ids: conversations of the corpus in a pair's chat template, and random ones."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from functools import cache

import torch
import transformers

from sglang_dflash.check.diagnose.client import Message
from sglang_dflash_lab.pairs import target_path
from sglang_dflash_lab.pairs.corpus import TASKS, Prompt, prompts


@cache
def corpus(pair: str, number: int, seed: int = 0, shape: str | None = None) -> list[list[int]]:
    """Token ids of ``number`` held-out conversations, all tasks in turn; short and long unless ``shape`` says."""
    per_task = [prompts(task, n=-(-number // len(TASKS)), seed=seed, shape=shape) for task in TASKS]
    return chat_ids(pair, list(itertools.islice(itertools.chain.from_iterable(zip(*per_task, strict=True)), number)))


def chat_ids(pair: str, asked: Sequence[Prompt], **switches: bool) -> list[list[int]]:
    """The prompts as the pair's chat template renders them; ``switches`` of the template."""
    return message_ids(pair, [prompt.messages for prompt in asked], **switches)


def message_ids(pair: str, asked: Sequence[Sequence[Message]], **switches: bool) -> list[list[int]]:
    """Conversations as the pair's chat template renders them."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(target_path(pair))
    return [
        tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False, **switches)
        for messages in asked
    ]


def random_prompts(pair: str, number: int, length: int = 24) -> list[list[int]]:
    """Token ids in no order: after text that it never saw the target is unsure of every token."""
    vocab = json.loads((target_path(pair) / "config.json").read_text())["vocab_size"]
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab, (number, length), generator=generator).tolist()


def schema_of(prompt: Prompt) -> str:
    """A JSON schema for what the question asks: its keys, in its order."""
    kinds = {str: {"type": "string", "maxLength": 16}, int: {"type": "integer", "minimum": 0, "maximum": 999}}
    properties = {key: kinds[type(value)] for key, value in prompt.expected.items()}
    shape = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return json.dumps(shape)
