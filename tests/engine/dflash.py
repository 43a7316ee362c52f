"""What the DFLASH engine tests share: prompts, servers of a pair, answers, and the plain decoding they must equal."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import transformers

from sglang_dflash.pairs import drafter_path, target_path
from sglang_dflash.pairs.corpus.prompts import TASKS, prompts
from tests.engine.serving import Server, running

BASE = ("--dtype", "float32", "--skip-tokenizer-init", "--max-running-requests", "8", "--enable-metrics")
# Track boundaries of the recurrent states every 64 tokens, so that short prompts cross some inside a block.
TRACKED = ("--mamba-track-interval", "64")
PROBE = str(Path(__file__).parent / "probe")


@dataclass(frozen=True)
class Answer:
    """One generation: its new tokens and SGLang's ``meta_info``."""

    tokens: list[int]
    meta: dict[str, Any]


@cache
def corpus(pair: str, number: int, seed: int = 0, shape: str | None = None) -> list[list[int]]:
    """Token ids of ``number`` held-out conversations, all tasks in turn; short and long unless ``shape`` says."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(target_path(pair))
    per_task = [prompts(task, n=-(-number // len(TASKS)), seed=seed, shape=shape) for task in TASKS]
    chosen = itertools.islice(itertools.chain.from_iterable(zip(*per_task, strict=True)), number)
    return [
        tokenizer.apply_chat_template(list(prompt.messages), add_generation_prompt=True, return_dict=False)
        for prompt in chosen
    ]


def target_arguments(pair: str) -> tuple[str, ...]:
    tracked = () if pair == "tiny-dense" else TRACKED
    return ("--model-path", str(target_path(pair)), *BASE, *tracked)


def draft_arguments(pair: str, drafter: str = "good", block: int = 16) -> tuple[str, ...]:
    return (
        "--speculative-algorithm",
        "DFLASH",
        "--speculative-draft-model-path",
        str(drafter_path(pair, drafter)),
        "--speculative-num-draft-tokens",
        str(block),
    )


@contextlib.contextmanager
def plain_server(pair: str, folder: Path, *arguments: str) -> Iterator[Server]:
    """The pair's target without speculation."""
    with running(folder, *target_arguments(pair), *arguments) as server:
        yield server


@contextlib.contextmanager
def dflash_server(
    pair: str, folder: Path, *arguments: str, drafter: str = "good", block: int = 16, **environment: str
) -> Iterator[Server]:
    """The pair under DFLASH; asserts that it is our worker that serves."""
    command = (*target_arguments(pair), *draft_arguments(pair, drafter, block), *arguments)
    with running(folder, *command, **environment) as server:
        info = worker_info(server)
        assert info["drafter"] == str(drafter_path(pair, drafter))
        assert info["block_size"] == block
        yield server


def worker_info(server: Server) -> dict[str, Any]:
    """What our worker says of itself in ``/server_info``."""
    info: dict[str, Any] = server.get("/server_info").json()["internal_states"][0]["sglang_dflash"]
    return info


def generate(server: Server, prompt: Sequence[int], max_new_tokens: int = 64, **body: Any) -> Answer:
    """One greedy generation (``sampling_params`` of ``body`` win)."""
    sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, **body.get("sampling_params", {})}
    response = server.post("/generate", {**body, "input_ids": list(prompt), "sampling_params": sampling})
    assert response.status_code == 200, response.text
    answer = response.json()
    return Answer(answer["output_ids"], answer["meta_info"])


def generate_all(
    server: Server, inputs: Sequence[Sequence[int]], concurrency: int, max_new_tokens: int = 64, **body: Any
) -> list[Answer]:
    """Every prompt once, ``concurrency`` at a time."""
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda prompt: generate(server, prompt, max_new_tokens, **body), inputs))


def flush(server: Server) -> None:
    """Empty the prefix cache; SGLang refuses while a request runs, and so proves that none does."""
    assert server.post("/flush_cache").status_code == 200


def assert_nothing_leaked(server: Server) -> None:
    """SGLang checks its KV and state slots whenever it is idle, and ends the server if some are missing."""
    flush(server)
    assert server.get("/health_generate").status_code == 200
    state = server.get("/server_info").json()["internal_states"][0]
    assert state["sglang_dflash"]["version"]
