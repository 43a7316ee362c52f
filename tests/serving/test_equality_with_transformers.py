"""Greedy tokens of SGLang on the CPU platform are those of transformers, on the same random fp32 checkpoint."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from tests.support.checkpoints import ARCHITECTURES, COMMON, assert_greedy, build
from tests.support.generation import answers
from tests.support.servers import Server, running

pytestmark = pytest.mark.engine

NEW_TOKENS, CHUNK = 24, 128
# Around the sizes where something changes: a page (16), a GDN chunk and track interval (64), a prefill chunk (128).
LENGTHS = (1, 2, 15, 17, 63, 64, 65, 128, 130, 257, 700)
CONCURRENT_LENGTHS = (3, 16, 33, 64, 127, 129, 200, 450)
BASE = ("--dtype", "float32", "--skip-tokenizer-init", "--max-running-requests", "8")
TRACKED = ("--mamba-radix-cache-strategy", "extra_buffer", "--mamba-track-interval", "64")
# How to serve: flags for every architecture, and those for recurrent ones.
WAYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "overlap": ((), TRACKED),
    "no overlap": (("--disable-overlap-schedule",), ("--mamba-radix-cache-strategy", "no_buffer")),
    "pages of 16": (("--page-size", "16"), TRACKED),
    "two ranks": (("--tp-size", "2"), ()),
}
# Qwen3, Qwen3.5 and its MoE serve the tiny pairs, which other tests hold to transformers.
QUICK = ("qwen3_next", "overlap")
CASES = (
    *((name, way) for name in ARCHITECTURES for way in ("overlap", "no overlap", "pages of 16")),
    *((name, "two ranks") for name in ("qwen3", "qwen3_5_moe")),
)


def random_prompt(length: int, seed: int) -> list[int]:
    return random.Random(f"{seed}/{length}").choices(range(3, COMMON["vocab_size"]), k=length)


@pytest.mark.parametrize(
    ("name", "way"), [c if c == QUICK else pytest.param(*c, marks=pytest.mark.slow) for c in CASES]
)
def test_tokens_are_those_of_transformers(name: str, way: str, tmp_path: Path) -> None:
    """One prompt at a time, eight together, and from the prefix cache."""
    model = build(name)
    model.save_pretrained(tmp_path / name)
    always, recurrent = WAYS[way]
    arguments = (*BASE, "--chunked-prefill-size", str(CHUNK), *always, *(() if name == "qwen3" else recurrent))
    with running(tmp_path, "--model-path", str(tmp_path / name), *arguments) as server:

        def cached(*prompts: list[int]) -> list[int]:
            """Check prompts that arrive together; how many of their tokens the cache held."""
            return assert_equal(model, server, list(prompts))

        for length in LENGTHS:
            cached(random_prompt(length, seed=1))
        cached(*(random_prompt(length, seed=2) for length in CONCURRENT_LENGTHS))
        full_chunks = re.findall(rf"Prefill batch.*#new-token: {CHUNK},", server.log)
        assert len(full_chunks) >= 700 // CHUNK, "prompts were not prefilled in chunks"
        shared = random_prompt(300, seed=3)
        cached(shared)
        again = cached(shared)
        longer = cached(*(shared + random_prompt(length, seed=4) for length in (1, 40, 90)))
        cached(shared[:150] + random_prompt(30, seed=5))
        assert min(*again, *longer) > 0


def assert_equal(model: object, server: Server, prompts: list[list[int]]) -> list[int]:
    params = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    found = answers(server, prompts, params)
    for prompt, answer in zip(prompts, found, strict=True):
        assert len(answer["output_ids"]) == NEW_TOKENS
        assert_greedy(model, prompt, answer["output_ids"])
    return [answer["meta_info"]["cached_tokens"] for answer in found]
