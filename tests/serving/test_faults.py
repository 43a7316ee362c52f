"""Numbers that are not finite cost acceptance or the request that they hit, and nothing else."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.generation import Answer, flush, generate, generate_all, tokens_per_step
from tests.support.prompts import corpus
from tests.support.servers import Server, worker_info

pytestmark = pytest.mark.engine

PAIR = "tiny-hybrid"
NEW_TOKENS = 64
WHOLE = {"ignore_eos": True}


@pytest.fixture(scope="module")
def healthy(dflash_hybrid: Server) -> list[Answer]:
    return ask(dflash_hybrid)


def ask(server: Server) -> list[Answer]:
    flush(server)
    return generate_all(server, corpus(PAIR, 8), 8, NEW_TOKENS, sampling_params=WHOLE)


@contextlib.contextmanager
def present(file: Path, text: str = "") -> Iterator[None]:
    file.write_text(text)
    yield
    file.unlink()


@pytest.mark.parametrize("fault", ["nan_context", pytest.param("nan_drafts", marks=pytest.mark.slow)])
def test_a_drafter_that_is_not_finite_costs_acceptance_alone(
    fault: str, dflash_hybrid: Server, healthy: list[Answer]
) -> None:
    server, folder = dflash_hybrid, dflash_hybrid.folder
    before = worker_info(server)["broken_drafts"]
    with present(folder / fault):
        spoiled = ask(server)
    after = ask(server)
    for answers in (spoiled, after):
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in healthy]
    assert tokens_per_step(spoiled) < 1.5 < tokens_per_step(healthy)
    assert tokens_per_step(after) == tokens_per_step(healthy), "what was spoiled is still read"
    assert worker_info(server)["broken_drafts"] > before
    assert server.log.count("the drafter's output is not finite") == 1
    (shown,) = re.findall(r"^sglang_dflash:broken_drafts\{.*\} (\S+)$", server.get("/metrics").text, re.MULTILINE)
    assert float(shown) > 0


def test_a_target_that_is_not_finite_costs_one_request(dflash_hybrid: Server, healthy: list[Answer]) -> None:
    server, folder = dflash_hybrid, dflash_hybrid.folder
    flush(server)
    prompts = corpus(PAIR, 8)
    with present(folder / "nan_target", "spoiled"), ThreadPoolExecutor(8) as pool:
        hit = pool.submit(generate, server, prompts[0], NEW_TOKENS, sampling_params=WHOLE, rid="spoiled")
        rest = list(pool.map(lambda p: generate(server, p, NEW_TOKENS, sampling_params=WHOLE), prompts[1:]))
        assert hit.result().tokens != healthy[0].tokens
    assert [answer.tokens for answer in rest] == [answer.tokens for answer in healthy[1:]]
    assert [answer.tokens for answer in ask(server)] == [answer.tokens for answer in healthy]
