"""Other requests in a batch change no answer: seeds, sessions, grammars, and prefills in the same step."""

from __future__ import annotations

import json
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import pytest

from sglang_dflash_lab.pairs.corpus import Prompt, prompts
from tests.support.catalogue import processor
from tests.support.generation import Params, answers, tokens
from tests.support.prompts import chat_ids, random_prompts, schema_of
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


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_schema_answer_parses_and_its_drafts_are_accepted(temperature: float, dflash_hybrid: Server) -> None:
    asked = prompts("json", n=24)
    inputs = chat_ids(PAIR, asked)
    params = [
        {"temperature": temperature, "sampling_seed": i, "max_new_tokens": 200, "json_schema": schema_of(prompt)}
        for i, prompt in enumerate(asked)
    ]
    found = answers(dflash_hybrid, inputs, params)
    for answer, prompt in zip(found, asked, strict=True):
        assert list(json.loads(answer["text"])) == list(prompt.expected)
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"
    metas = [answer["meta_info"] for answer in found]
    # The first token of each answer comes from its prefill.
    assert sum(m["completion_tokens"] - 1 for m in metas) > 1.5 * sum(m["spec_verify_ct"] for m in metas)


MIXED_KINDS = ("json schema", "regex", "custom processor", "regex and penalty")


def params_of(kind: str, prompt: Prompt) -> Params:
    constraint: dict[str, Params] = {
        "json schema": {"json_schema": schema_of(prompt)},
        "regex": {"regex": "([A-Za-z ,]{1,30}[0-9]{1,3}[ .])*"},
        "custom processor": {"custom_params": {}},
        "regex and penalty": {"regex": "[A-Za-z ,.]{40,80}", "frequency_penalty": 1.0},
    }
    return {"temperature": 0, "max_new_tokens": 64, **constraint[kind]}


def test_requests_that_decode_alongside_a_prefill_answer_as_plain_decoding_does(
    plain_hybrid: Server, recorded_hybrid: Server
) -> None:
    """Under ``--enable-mixed-chunk`` such a batch samples one more token of each.

    With overlap the scheduler has not seen the tokens of the step before, so a grammar lags one step, and so does the
    history that a custom logit processor reads.
    """
    # More prompts than may run, so that the rest are prefilled alongside the first, without timing arrivals.
    asked, kinds = prompts("json", n=16), MIXED_KINDS * 4
    params = [params_of(kind, prompt) for kind, prompt in zip(kinds, asked, strict=True)]
    body = {
        "custom_logit_processor": [processor("BanAFifth") if kind == "custom processor" else None for kind in kinds]
    }
    inputs = chat_ids("tiny-hybrid", asked)
    expected = answers(plain_hybrid, inputs, params, **body)
    found = answers(recorded_hybrid, inputs, params, **body)
    for ours, plain, kind in zip(tokens(found), tokens(expected), kinds, strict=True):
        assert ours == plain, kind
    unseen = defaultdict(list)
    kind_of = {answer["meta_info"]["id"]: kind for answer, kind in zip(found, kinds, strict=True)}
    for line in map(json.loads, (recorded_hybrid.folder / "mixed.jsonl").read_text().splitlines()):
        unseen[kind_of.get(line["rid"])].append(line["unseen"])
    for kind in ("regex", "custom processor"):  # the longest answers
        assert unseen[kind] and min(unseen[kind]) > 0, f"{kind}: no prefill ran alongside, or the scheduler kept up"
