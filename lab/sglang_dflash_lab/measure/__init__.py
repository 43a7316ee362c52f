"""Measurements of docs/measured.md and docs/internals, one module each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sglang_dflash_lab.bench.arms import find_pair, parse_arms
from sglang_dflash_lab.bench.server import Launch
from sglang_dflash_lab.bench.session import Settings
from sglang_dflash_lab.pairs import target_path
from sglang_dflash_lab.pairs.corpus import Prompt


def launch(pair: str, mode: str, requests: int, *arguments: str) -> Launch:
    """Return the launch of a server for token ids and ``requests`` concurrent requests."""
    arms, found = parse_arms(mode), find_pair(pair, None, None)
    server_args = ("--skip-tokenizer-init", *arguments)
    return Settings(found, arms, [], [requests], 0, 1, Path(), server_args=server_args).launch(arms[0])


def token_ids(pair: str, prompts: Sequence[Prompt]) -> list[list[int]]:
    import transformers

    template = transformers.AutoTokenizer.from_pretrained(target_path(pair)).apply_chat_template
    return [template(list(prompt.messages), add_generation_prompt=True, return_dict=False) for prompt in prompts]
