"""Prefill and decoding in two servers: the answers of one server, in as many steps.

Steps are compared too because tokens would be right with any drafter K/V.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.generation import Answer, counted, flush, generate_all
from tests.support.prompts import corpus
from tests.support.servers import (
    RANDOM_WIDTHS,
    RETRACTED,
    WIDE,
    Disaggregated,
    Server,
    dflash_server,
    disaggregated,
    missing_transfer_backend,
    with_plugin,
    worker_info,
)

NEW_TOKENS = 48
WINDOW = ("--speculative-draft-window-size", "64")
CHUNKED = ("--chunked-prefill-size", "128", "--page-size", "16")

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(missing_transfer_backend() is not None, reason=str(missing_transfer_backend())),
]


def assert_idle_and_whole(servers: Disaggregated) -> None:
    """SGLang checks its KV and state slots whenever it is idle, and ends the server if some are missing."""
    for server in (servers.prefill, servers.decode):
        flush(server)
        assert server.process.poll() is None
        assert worker_info(server)["version"]


def prompts(pair: str) -> list[list[int]]:
    """Short ones, and one of several chunks and windows."""
    short = corpus(pair, 8, seed=4)
    return [*short, [token for prompt in short for token in prompt][:700]]


def ask(server: Server, inputs: list[list[int]], **sampling: Any) -> list[Answer]:
    return generate_all(server, inputs, 4, NEW_TOKENS, sampling_params=sampling)


CASES: dict[str, tuple[str, tuple[str, ...], dict[str, str]]] = {
    "hybrid": ("tiny-hybrid", (), {}),
    "dense": ("tiny-dense", (), {}),
    "draft window": ("tiny-hybrid", WINDOW, {}),
    "draft window, pages, chunks": ("tiny-hybrid", (*WINDOW, *CHUNKED), {}),
    "retraction": ("tiny-hybrid", (), RETRACTED),
    "draft window, retraction": ("tiny-hybrid", WINDOW, RETRACTED),
}


@pytest.mark.parametrize("case", CASES)
def test_tokens_and_steps_are_those_of_one_server(case: str, tmp_path: Path) -> None:
    pair, arguments, environment = CASES[case]
    inputs, penalty = prompts(pair), {"frequency_penalty": 0.4}
    seeded = {"temperature": 1.0, "sampling_seed": 7}
    requests: list[dict[str, Any]] = [{}] if environment else [{}, penalty, seeded]
    with dflash_server(pair, tmp_path, *arguments) as server:
        expected = [counted(ask(server, inputs, **sampling)) for sampling in requests]
    with disaggregated(pair, tmp_path, *arguments, **environment) as servers:
        found = [counted(ask(servers.router, inputs, **sampling)) for sampling in requests]
        assert found == expected
        assert not worker_info(servers.prefill)["steps_by_width"]
        if environment == RETRACTED:
            assert any(map(int, re.findall(r"#retracted_reqs: (\d+)", servers.decode.log)))
        assert_idle_and_whole(servers)


def test_any_width_serves_the_same_tokens(tmp_path: Path) -> None:
    inputs = prompts("tiny-hybrid")
    with dflash_server("tiny-hybrid", tmp_path) as server:
        expected = [answer.tokens for answer in ask(server, inputs)]
    histories = with_plugin(tmp_path, "history")
    with disaggregated("tiny-hybrid", tmp_path, *RANDOM_WIDTHS, *WIDE, drafter="noisy", **histories) as servers:
        assert [answer.tokens for answer in ask(servers.router, inputs)] == expected
        assert len(worker_info(servers.decode)["steps_by_width"]) > 1
        assert_idle_and_whole(servers)
