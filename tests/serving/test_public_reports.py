"""Recipes from public bug reports of other engines, which this package passes: answers are plain decoding's.

Last, a K/V pool that just holds a request (SGLang 14942): it ends by length, with every token of plain decoding.
"""

from __future__ import annotations

import contextlib
import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.serving.test_ends import PAIR, TRACK, tokenizer
from tests.support.generation import Answer, assert_nothing_leaked, flush, generate, generate_all
from tests.support.prompts import corpus
from tests.support.servers import (
    RANDOM_WIDTHS,
    WIDE_WIDTHS,
    Server,
    dflash_server,
    disaggregated,
    missing_transfer_backend,
    plain_server,
)

pytestmark = pytest.mark.engine


def cached(answers: list[Answer]) -> list[tuple[list[int], int]]:
    return [(answer.tokens, answer.meta["cached_tokens"]) for answer in answers]


def stretch(length: int, seed: int = 0) -> list[int]:
    """Known text of exactly ``length`` tokens."""
    return list(itertools.islice(itertools.chain.from_iterable(corpus(PAIR, 24, seed=seed)), length))


def test_a_last_chunk_of_one_token_is_no_decoding_step(recorded_hybrid: Server, plain_hybrid: Server) -> None:
    """vLLM 34845: chunks of 256 tokens in mixed batches."""
    lengths = [257, 513, 256]
    found = []
    for each in (recorded_hybrid, plain_hybrid):
        flush(each)
        with ThreadPoolExecutor(3) as pool:  # they decode meanwhile
            beside = [pool.submit(generate, each, prompt, 64) for prompt in corpus(PAIR, 3)]
            asked = [generate(each, stretch(length, length), 16).tokens for length in lengths]
            found.append([asked, *(each.result().tokens for each in beside)])
    assert found[0] == found[1]


def test_requests_that_were_cancelled_and_sent_again_spoil_no_other(server: Server, plain_hybrid: Server) -> None:
    """SGLang 23392: a shared prefix of whole track intervals, two of three cut at once."""
    shared = stretch(2 * TRACK)
    endings = [stretch(9, seed) for seed in range(1, 7)]
    expected = [answer.tokens for answer in generate_all(plain_hybrid, [shared + end for end in endings], 6, 24)]

    def cut(end: list[int]) -> None:
        body = {"input_ids": shared + end, "stream": True, "sampling_params": {"temperature": 0, "max_new_tokens": 24}}
        with contextlib.suppress(httpx.TimeoutException):
            httpx.post(server.url + "/generate", json=body, timeout=0.02)

    for _ in range(2):
        flush(server)
        with ThreadPoolExecutor(8) as pool:
            cuts = [pool.submit(cut, end) for end in endings[:2]]
            found = list(pool.map(lambda end: generate(server, shared + end, 24).tokens, endings))
            _ = [each.result() for each in cuts]
        assert found == expected


def test_prefix_hits_are_plain_decodings(server: Server, plain_hybrid: Server) -> None:
    """vLLM 54360: prompts of every length twice, and the turns of conversations."""
    found = []
    for each in (server, plain_hybrid):
        flush(each)
        prompts = [stretch(length, length) for length in range(40, 330, 58)]
        turns = [generate(each, prompt, 8) for prompt in prompts for _ in range(2)]
        for text in corpus(PAIR, 2, seed=5):
            for turn in range(4):
                turns.append(generate(each, text, 24))
                text = [*text, *turns[-1].tokens, *tokenizer()(f"And then {turn}?")["input_ids"]]
        found.append(cached(turns))
    assert found[0] == found[1]


POOL, ASKED = 384, 200
LENGTHS = (350, 280, 200)
# Prompts of requests that the pool cannot hold together.
CROWD = (160, 130, 100, 30)
SHORT = ("--max-total-tokens", str(POOL))
PAST_EOS = {"sampling_params": {"ignore_eos": True}}


def told(answer: Answer) -> tuple[list[int], str]:
    return answer.tokens, answer.meta["finish_reason"]["type"]


def expected(plain: Server, length: int, asked: int = ASKED, most: int = POOL - 2) -> tuple[list[int], str]:
    """Plain decoding's answer with as many tokens as SGLang allows in a pool of this size."""
    return told(generate(plain, stretch(length, length), min(asked, most - length), **PAST_EOS))


def check(server: Server, plain: Server, most: int = POOL - 2) -> None:
    for length in LENGTHS:  # the second and third evict the ones before from the prefix cache
        answer = generate(server, stretch(length, length), ASKED, **PAST_EOS)
        assert told(answer) == expected(plain, length, most=most), length
    together = generate_all(server, [stretch(length, length) for length in CROWD], len(CROWD), 120, **PAST_EOS)
    for answer, length in zip(together, CROWD, strict=True):
        assert told(answer) == expected(plain, length, 120, most), length
    assert_nothing_leaked(server)


# The fast proof, without a server: ``tests/worker/test_state.py``.
@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(), WIDE_WIDTHS, ("--speculative-draft-window-size", "64")])
def test_a_request_that_fills_the_pool_ends_by_length(
    arguments: tuple[str, ...], plain_hybrid: Server, tmp_path: Path
) -> None:
    block = 32 if arguments == WIDE_WIDTHS else 16
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
            answer = generate(servers.router, stretch(length, length), ASKED, **PAST_EOS)
            assert told(answer) == expected(plain_hybrid, length), length
            flush(servers.decode)
