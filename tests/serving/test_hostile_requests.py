"""Sampling parameters that ended the scheduler are refused by name or have no effect; their neighbours are answered."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.support.servers import Server

pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("features")]  # whose server this is

# No token has the second of these numbers, which was an index all the same.
GOOD: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "min_new_tokens": 4, "stop_token_ids": [7, 10**9]}
BAD: list[dict[str, Any]] = [
    {"top_k": 1 << 40},
    {"logit_bias": {"3": 1e39}},
    {"repetition_penalty": 1e-300},
    {"temperature": 1e300},
]


def generate(server: Server, params: dict[str, Any]) -> httpx.Response:
    body = {"input_ids": list(range(20, 40)), "sampling_params": {"max_new_tokens": 24, **params}}
    return httpx.post(f"{server.url}/generate", json=body, timeout=120)


def output_of(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["output_ids"]
    return tokens


def test_they_are_refused_and_their_neighbours_answered(dflash_hybrid: Server) -> None:
    alone = output_of(generate(dflash_hybrid, GOOD))
    with ThreadPoolExecutor(16) as pool:
        asked = [params for bad in BAD for params in (GOOD, bad)]
        answers = list(pool.map(lambda params: generate(dflash_hybrid, params), asked))
    for params, answer in zip(asked, answers, strict=True):
        if params is GOOD:
            assert output_of(answer) == alone
        else:
            assert answer.status_code == 400, params
            assert next(iter(params)) in answer.text and "Remedy" in answer.text
    assert output_of(generate(dflash_hybrid, GOOD)) == alone
