"""Requests to ``/generate`` and their answers: one at a time, some at a time, or many in one request."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from tests.support.servers import Server

Params = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """One generation: its new tokens and SGLang's ``meta_info``."""

    tokens: list[int]
    meta: dict[str, Any]


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


def answers(
    server: Server, prompts: Sequence[Sequence[int]], params: Params | Sequence[Params], **body: Any
) -> list[dict[str, Any]]:
    """One request holding every prompt; ``params`` for all of them or one for each."""
    response = raw(server, prompts, params, **body)
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = response.json()
    return found


def raw(
    server: Server, prompts: Sequence[Sequence[int]], params: Params | Sequence[Params], **body: Any
) -> httpx.Response:
    return server.post("/generate", {"input_ids": [list(p) for p in prompts], "sampling_params": params, **body})


def tokens(found: Sequence[dict[str, Any]]) -> list[list[int]]:
    return [answer["output_ids"] for answer in found]


def flush(server: Server) -> None:
    """Empty the prefix cache; SGLang refuses while a request runs, and so proves that none stays.

    A slow machine may still be at the health check of the server's start, which is a request.
    """
    assert (answer := server.post("/flush_cache?timeout=60")).status_code == 200, answer.text


def assert_nothing_leaked(server: Server) -> None:
    """SGLang checks its KV and state slots whenever it is idle, and ends the server if some are missing."""
    flush(server)
    assert server.get("/health_generate").status_code == 200
    state = server.get("/server_info").json()["internal_states"][0]
    assert state["sglang_dflash"]["version"]
