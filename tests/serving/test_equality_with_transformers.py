"""Greedy tokens of SGLang on the CPU platform are those of transformers, on the same random fp32 checkpoint."""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.checkpoints import ARCHITECTURES, HYBRIDS, VOCAB_SIZE, Checkpoints, assert_greedy
from tests.support.servers import Server, running

pytestmark = pytest.mark.engine

NEW_TOKENS = 24
CHUNK = 128
# Around the sizes where something changes: a page (16), a GDN chunk and track interval (64), a prefill chunk (128).
LENGTHS = (1, 2, 15, 17, 63, 64, 65, 128, 130, 257, 700)
CONCURRENT_LENGTHS = (3, 16, 33, 64, 127, 129, 200, 450)
BASE = ("--dtype", "float32", "--skip-tokenizer-init", "--max-running-requests", "8")
CHUNKED = ("--chunked-prefill-size", str(CHUNK))
TRACKED = ("--mamba-radix-cache-strategy", "extra_buffer", "--mamba-track-interval", "64")


def random_prompt(length: int, seed: int) -> list[int]:
    return random.Random(f"{seed}/{length}").choices(range(3, VOCAB_SIZE), k=length)


def generate(server: Server, prompts: list[list[int]]) -> list[tuple[list[int], int]]:
    """New tokens and cached prompt tokens of prompts that arrive together."""
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    response = server.post("/generate", {"input_ids": prompts, "sampling_params": sampling})
    assert response.status_code == 200, response.text
    return [(answer["output_ids"], answer["meta_info"]["cached_tokens"]) for answer in response.json()]


@contextlib.contextmanager
def serve(checkpoints: Checkpoints, name: str, folder: Path, *arguments: str) -> Iterator[Server]:
    checkpoints.model(name)
    with running(folder, "--model-path", str(checkpoints.path(name)), *BASE, *arguments) as server:
        yield server


def assert_equal(checkpoints: Checkpoints, name: str, server: Server, prompts: list[list[int]]) -> list[int]:
    """Check prompts that arrive together against the reference; their cached prompt tokens."""
    answers = generate(server, prompts)
    for prompt, (output, _) in zip(prompts, answers, strict=True):
        assert len(output) == NEW_TOKENS
        assert_greedy(checkpoints.model(name), prompt, output)
    return [cached for _, cached in answers]


def assert_equal_one_by_one_and_together(checkpoints: Checkpoints, name: str, server: Server) -> None:
    for length in LENGTHS:
        assert_equal(checkpoints, name, server, [random_prompt(length, seed=1)])
    assert_equal(checkpoints, name, server, [random_prompt(n, seed=2) for n in CONCURRENT_LENGTHS])


def assert_equal_from_the_cache(checkpoints: Checkpoints, name: str, server: Server) -> None:
    """A prompt again, longer, and cut: the first two must reuse what the cache holds of it."""
    shared = random_prompt(300, seed=3)
    assert_equal(checkpoints, name, server, [shared])
    (again,) = assert_equal(checkpoints, name, server, [shared])
    longer = assert_equal(checkpoints, name, server, [shared + random_prompt(n, seed=4) for n in (1, 40, 90)])
    assert_equal(checkpoints, name, server, [shared[:150] + random_prompt(30, seed=5)])
    assert again > 0
    assert all(cached > 0 for cached in longer)


# Elsewhere Qwen3 (``tiny-dense``) and Qwen3.5 (``tiny-hybrid``) are held to transformers in chunks and from the cache:
# test_drafter_shapes.py, test_dflash_reference.py, test_draft_window.py.
QUICK = ("qwen3_next", "qwen3_5_moe")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in ARCHITECTURES])
def test_overlap_radix_cache_and_chunked_prefill(name: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    """The defaults: overlap scheduling and the radix cache, with ``extra_buffer`` for recurrent models."""
    arguments = (*CHUNKED, *(TRACKED if name in HYBRIDS else ()))
    with serve(checkpoints, name, tmp_path, *arguments) as server:
        assert_equal_one_by_one_and_together(checkpoints, name, server)
        assert_equal_from_the_cache(checkpoints, name, server)
        full_chunks = re.findall(rf"Prefill batch.*#new-token: {CHUNK},", server.log)
        assert len(full_chunks) >= 700 // CHUNK, "prompts were not prefilled in chunks"


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_without_overlap_and_without_extra_buffer(name: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    arguments = ("--mamba-radix-cache-strategy", "no_buffer") if name in HYBRIDS else ()
    with serve(checkpoints, name, tmp_path, "--disable-overlap-schedule", *CHUNKED, *arguments) as server:
        assert_equal_one_by_one_and_together(checkpoints, name, server)
        assert_equal_from_the_cache(checkpoints, name, server)


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_pages_of_16_tokens(name: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    arguments = ("--page-size", "16", *CHUNKED, *(TRACKED if name in HYBRIDS else ()))
    with serve(checkpoints, name, tmp_path, *arguments) as server:
        assert_equal_one_by_one_and_together(checkpoints, name, server)
        assert_equal_from_the_cache(checkpoints, name, server)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_moe"])
def test_two_tensor_parallel_ranks(name: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    with serve(checkpoints, name, tmp_path, "--tp-size", "2", *CHUNKED) as server:
        assert_equal_one_by_one_and_together(checkpoints, name, server)


@pytest.mark.slow
def test_text_on_a_multimodal_checkpoint(checkpoints: Checkpoints, tmp_path: Path) -> None:
    with serve(checkpoints, "qwen3_5_vision", tmp_path, *CHUNKED) as server:
        assert_equal_one_by_one_and_together(checkpoints, "qwen3_5_vision", server)
