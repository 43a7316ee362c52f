"""Other requests in a batch change no seeded answer; sessions, grammars and prefills beside it: the soak."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.generation import Params, answers, tokens
from tests.support.prompts import random_prompts
from tests.support.servers import Server

pytestmark = pytest.mark.engine

PAIR = "tiny-hybrid"
NEW_TOKENS = 32
PROMPTS = random_prompts(PAIR, 8)
KINDS: list[Params] = [
    {"temperature": 1.0},
    {"temperature": 1.4, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 20, "min_p": 0.02},
    {"temperature": 1.0, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
]
SEEDED = [
    {**KINDS[i % len(KINDS)], "sampling_seed": 100 + i, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    for i in range(len(PROMPTS))
]


@pytest.fixture(scope="module")
def alone(dflash_hybrid: Server) -> list[list[int]]:
    """The text of every seeded request on a server that does nothing else."""
    found = [tokens(answers(dflash_hybrid, [p], [params]))[0] for p, params in zip(PROMPTS, SEEDED, strict=True)]
    reseeded = [{**params, "sampling_seed": 7} for params in SEEDED]
    assert all(a != b for a, b in zip(found, tokens(answers(dflash_hybrid, PROMPTS, reseeded)), strict=True))
    return found


def test_a_seed_gives_the_same_text_beside_requests_of_other_kinds_that_come_and_go(
    dflash_hybrid: Server, alone: list[list[int]]
) -> None:
    def ask(prompt: list[int], params: Params) -> list[int]:
        return tokens(answers(dflash_hybrid, [prompt], params))[0]

    others: list[Params] = [
        {"temperature": 0},
        {"temperature": 1.3, "top_p": 0.5},
        {"temperature": 1.0, "presence_penalty": 1.0, "logit_bias": {"5": 4.0}},
        {"temperature": 0.9, "regex": "[a-z ]{30,40}"},
    ]
    params = [each for i, seeded in enumerate(SEEDED) for each in (others[i % 4], seeded)]
    inputs = [each for i, prompt in enumerate(PROMPTS) for each in (PROMPTS[-i], prompt)]
    with ThreadPoolExecutor(len(inputs)) as pool:
        assert list(pool.map(ask, inputs, params))[1::2] == alone


def test_samples_of_one_prompt_share_its_seed(dflash_hybrid: Server, alone: list[list[int]]) -> None:
    found = answers(dflash_hybrid, PROMPTS[:1], {**SEEDED[0], "n": 3})
    assert tokens(found) == [alone[0]] * 3


def test_samples_under_a_grammar_come_together(dflash_hybrid: Server) -> None:
    """SGLang caches a prompt first, by a request of 0 tokens: a grammar may not read what stands for its sample."""
    params: Params = {"temperature": 0, "regex": "[a-z ]{4,20}", "max_new_tokens": NEW_TOKENS}
    alone = tokens(answers(dflash_hybrid, PROMPTS, params))
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda prompt: tokens(answers(dflash_hybrid, [prompt], {**params, "n": 3})), 4 * PROMPTS)
    assert list(found) == [[text] * 3 for text in 4 * alone]
