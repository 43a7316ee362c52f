"""A K/V pool that just holds a request: it ends by length, with every token that plain decoding delivers."""

from __future__ import annotations

from itertools import chain, islice
from pathlib import Path

import pytest

from tests.support.generation import Answer, assert_nothing_leaked, flush, generate, generate_all
from tests.support.pair_servers import (
    RANDOM_WIDTHS,
    WIDE_WIDTHS,
    dflash_server,
    disaggregated,
    missing_transfer_backend,
    plain_server,
)
from tests.support.prompts import corpus
from tests.support.servers import Server

pytestmark = pytest.mark.engine

PAIR, POOL, ASKED = "tiny-hybrid", 384, 200
LENGTHS = (350, 280, 200)
# Prompts of requests that the pool cannot hold together.
CROWD = (160, 130, 100, 30)
SHORT = ("--max-total-tokens", str(POOL))
PAST_EOS = {"sampling_params": {"ignore_eos": True}}


def prompt_of(length: int) -> list[int]:
    return list(islice(chain.from_iterable(corpus(PAIR, 24, seed=length)), length))


def told(answer: Answer) -> tuple[list[int], str]:
    return answer.tokens, answer.meta["finish_reason"]["type"]


def expected(plain: Server, length: int, asked: int = ASKED, most: int = POOL - 2) -> tuple[list[int], str]:
    """Plain decoding's answer with as many tokens as SGLang allows in a pool of this size."""
    return told(generate(plain, prompt_of(length), min(asked, most - length), **PAST_EOS))


def check(server: Server, plain: Server, most: int = POOL - 2) -> None:
    for length in LENGTHS:  # the second and third evict the ones before from the prefix cache
        answer = generate(server, prompt_of(length), ASKED, **PAST_EOS)
        assert told(answer) == expected(plain, length, most=most), length
    together = generate_all(server, [prompt_of(length) for length in CROWD], len(CROWD), 120, **PAST_EOS)
    for answer, length in zip(together, CROWD, strict=True):
        assert told(answer) == expected(plain, length, 120, most), length
    assert_nothing_leaked(server)


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        pytest.param((*WIDE_WIDTHS, "--speculative-num-draft-tokens", "32"), marks=pytest.mark.slow),
        pytest.param(("--speculative-draft-window-size", "64"), marks=pytest.mark.slow),
    ],
)
def test_a_request_that_fills_the_pool_ends_by_length(
    arguments: tuple[str, ...], plain_hybrid: Server, tmp_path: Path
) -> None:
    block = 32 if "32" in arguments else 16
    with dflash_server(PAIR, tmp_path, *SHORT, *arguments, block=block) as server:
        check(server, plain_hybrid)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("--disable-overlap-schedule",), RANDOM_WIDTHS])
def test_a_request_that_fills_a_pool_of_pages_ends_as_in_plain_decoding(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    """With pages SGLang allows fewer tokens, which depend on the prompt: the same pool serves plain decoding too."""
    pages = (*SHORT, "--page-size", "16")
    with plain_server(PAIR, tmp_path, *pages) as plain, dflash_server(PAIR, tmp_path, *pages, *arguments) as server:
        check(server, plain, most=POOL + ASKED)


@pytest.mark.slow
@pytest.mark.skipif(missing_transfer_backend() is not None, reason=str(missing_transfer_backend()))
def test_a_decoding_server_fills_its_pool(plain_hybrid: Server, tmp_path: Path) -> None:
    with disaggregated(PAIR, tmp_path, *SHORT) as servers:
        for length in LENGTHS:
            answer = generate(servers.router, prompt_of(length), ASKED, **PAST_EOS)
            assert told(answer) == expected(plain_hybrid, length), length
            flush(servers.decode)
