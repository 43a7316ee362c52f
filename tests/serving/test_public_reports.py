"""Recipes from public bug reports of other engines, which this package passes: answers are plain decoding's."""

from __future__ import annotations

import contextlib
import itertools
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.serving.test_ends import PAIR, TRACK, tokenizer
from tests.support.generation import Answer, counted, flush, generate, generate_all
from tests.support.pair_servers import RecordedServer
from tests.support.prompts import corpus
from tests.support.servers import Server

pytestmark = pytest.mark.engine


def cached(answers: list[Answer]) -> list[tuple[list[int], int]]:
    return [(answer.tokens, answer.meta["cached_tokens"]) for answer in answers]


def stretch(length: int, seed: int = 0) -> list[int]:
    """Known text of exactly ``length`` tokens."""
    return list(itertools.islice(itertools.chain.from_iterable(corpus(PAIR, 24, seed=seed)), length))


def test_acceptance_does_not_depend_on_the_number_of_users(dflash_hybrid: Server) -> None:
    """llama.cpp 27117, z-lab/dflash 146."""
    found = []
    for users in (1, 2, 4, 8):
        flush(dflash_hybrid)
        found.append(counted(generate_all(dflash_hybrid, corpus(PAIR, 8), users, 48)))
    assert all(each == found[0] for each in found[1:])


def test_an_end_just_before_a_track_boundary_leaves_the_prefix_whole(server: Server, plain_hybrid: Server) -> None:
    """llama.cpp 28049, vLLM 53912: the block that ends the answer crosses the boundary."""
    found = []
    for each in (server, plain_hybrid):
        flush(each)
        turns = []
        for before, prompt in enumerate(corpus(PAIR, 3), 1):
            more = 2 * TRACK - len(prompt) % TRACK - 3 * before
            first = generate(each, prompt, more, sampling_params={"ignore_eos": True})
            turns += [first, generate(each, [*prompt, *first.tokens, *range(200, 230)], 8)]
        found.append(cached(turns))
    assert found[0] == found[1]


def test_a_last_chunk_of_one_token_is_no_decoding_step(recorded_hybrid: RecordedServer, plain_hybrid: Server) -> None:
    """vLLM 34845: chunks of 256 tokens in mixed batches."""
    lengths = [257, 513, 256]
    found = []
    for each in (recorded_hybrid.server, plain_hybrid):
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
    expected = [answer.tokens for answer in generate_all(plain_hybrid, [shared + end for end in endings], 1, 24)]

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
