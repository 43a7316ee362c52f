"""Greedy requests of every kind: DFLASH answers as plain decoding does, and refuses by name what it cannot return."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import transformers
from sglang.srt.sampling import custom_logit_processor

from sglang_dflash_lab.pairs import target_path
from tests.support.generation import answers, assert_nothing_leaked, raw, tokens
from tests.support.prompts import corpus
from tests.support.servers import FEATURES, Server, dflash_server, strict, with_plugin

pytestmark = pytest.mark.engine

PAIR = "tiny-hybrid"
NEW_TOKENS = 48
PROMPTS = 6
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
    }
)
WITH_STATE = b"cdflash_test_plugin.custom_processor\nBanByCalls\n."  # pickled by its name: the servers load the plugin
# Two of SGLang's own: one forbids what its parameters list, the other looks at what its request has generated.
PROCESSORS = {
    "custom processor": custom_logit_processor.DisallowedTokensLogitsProcessor.to_str(),
    "custom processor that looks back": custom_logit_processor.DeepseekOCRNoRepeatNGramLogitProcessor.to_str(),
    # By its name: the servers load the plugin.
    "custom processor with state": json.dumps({"callable": WITH_STATE.hex()}),
}


def body_of(name: str, greedy: list[list[int]]) -> dict[str, Any]:
    """The request under test; ``greedy`` are the prompts' plain continuations, so that constraints bite."""
    common = [token for answer in greedy for token in answer]
    commonest = sorted(set(common), key=lambda token: (-common.count(token), token))[:6]
    often, middle = commonest[0], greedy[0][NEW_TOKENS // 2]
    # The target is sure of the text it knows. Without its commonest tokens it is not, and a penalty changes its choice.
    unsure = {"logit_bias": {str(token): -60.0 for token in commonest}}
    params: dict[str, dict[str, Any]] = {
        "nothing special": {},
        "frequency penalty": {**unsure, "frequency_penalty": 1.2},
        "presence penalty": {**unsure, "presence_penalty": 1.7},
        "repetition penalty": {**unsure, "repetition_penalty": 1.6},
        "all penalties": {**unsure, "repetition_penalty": 1.3, "frequency_penalty": -0.4, "presence_penalty": 0.8},
        "minimum length": {"min_new_tokens": NEW_TOKENS - 5},
        "minimum length and penalty": {**unsure, "min_new_tokens": NEW_TOKENS - 5, "frequency_penalty": 0.9},
        "logit bias": unsure,
        "stop token": {"stop_token_ids": [middle]},
        "stop string": {"stop": [text_of([middle]), "no such text"]},
        "end ignored": {"ignore_eos": True},
        "custom processor": {"custom_params": {"token_ids": [often, middle]}},
        "custom processor that looks back": {"custom_params": {"ngram_size": 2, "window_size": 40}},
        "custom processor with state": {"custom_params": {}},
        "json schema": {"json_schema": SCHEMA},
        "regex": {"regex": "[a-z]{3,10} (is|was) [0-9]{1,3}\\."},
        "ebnf": {"ebnf": 'root ::= "a" ("b" | "cd"){2,9} "e"'},
        "regex and penalty": {"regex": "[a-z ]{20,40}", "frequency_penalty": 1.0},
    }
    body: dict[str, Any] = {"params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, **params[name]}}
    if name in PROCESSORS:
        body["custom_logit_processor"] = PROCESSORS[name]
    return body


CASES = (
    *("nothing special", "frequency penalty", "presence penalty", "repetition penalty", "all penalties"),
    *("minimum length", "minimum length and penalty", "logit bias", "stop token", "stop string", "end ignored"),
    *("json schema", "regex", "ebnf", "regex and penalty", *PROCESSORS),
)


QUICK = ("nothing special", "all penalties", "stop string", "json schema", *PROCESSORS)


def text_of(ids: list[int]) -> str:
    tokenizer = transformers.AutoTokenizer.from_pretrained(target_path(PAIR))
    return str(tokenizer.decode(ids))


@cache
def body_and_expected(plain: Server, name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The body of a case, and plain decoding's answers to it."""
    body = body_of(name, greedy(plain))
    return body, answers(plain, corpus(PAIR, PROMPTS), **body)


@cache
def greedy(plain: Server) -> list[list[int]]:
    params = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    return tokens(answers(plain, corpus(PAIR, PROMPTS), params))


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_the_answer_is_plain_decodings(name: str, server: Server, plain_hybrid: Server) -> None:
    body, expected = body_and_expected(plain_hybrid, name)
    found = answers(server, corpus(PAIR, PROMPTS), **body)
    assert tokens(found) == tokens(expected)
    for ours, plain in zip(found, expected, strict=True):
        assert ours["text"] == plain["text"]
        assert ours["meta_info"]["finish_reason"] == plain["meta_info"]["finish_reason"]
    if name != "nothing special":
        without = "logit bias" if "penalt" in name and "regex" not in name else "nothing special"
        assert tokens(found) != tokens(body_and_expected(plain_hybrid, without)[1]), "the case constrains nothing"


LOGPROBS: dict[str, Any] = {
    "params": {"temperature": 0, "max_new_tokens": NEW_TOKENS},
    "return_logprob": True,
    "logprob_start_len": 0,
    "top_logprobs_num": 4,
    "token_ids_logprob": [3, 77],
}


def test_log_probabilities_are_plain_decodings(server: Server, plain_hybrid: Server) -> None:
    found, expected = (answers(each, corpus(PAIR, PROMPTS), **LOGPROBS) for each in (server, plain_hybrid))
    for ours, plain in zip(found, expected, strict=True):
        for field in ("input_token_logprobs", "output_token_logprobs"):
            assert_same_logprobs([ours["meta_info"][field]], [plain["meta_info"][field]])
        for field in ("input_top_logprobs", "output_top_logprobs", "output_token_ids_logprobs"):
            assert_same_logprobs(ours["meta_info"][field], plain["meta_info"][field])


SCORED: dict[str, Any] = {
    "params": {"temperature": 0, "max_new_tokens": 0},
    "return_logprob": True,
    "logprob_start_len": 0,
    "token_ids_logprob": [3, 77],
}


def test_a_request_for_no_token_is_scored_and_samples_nothing(server: Server, plain_hybrid: Server) -> None:
    prompts = corpus(PAIR, PROMPTS)
    with ThreadPoolExecutor(2) as pool:  # beside requests that decode
        beside = pool.submit(answers, server, prompts, {"temperature": 0, "max_new_tokens": NEW_TOKENS})
        found = answers(server, prompts, **SCORED)
        beside.result()
    for ours, plain in zip(found, answers(plain_hybrid, prompts, **SCORED), strict=True):
        assert ours["output_ids"] == plain["output_ids"] == [] == ours["meta_info"]["output_token_logprobs"]
        assert ours["meta_info"]["finish_reason"] == plain["meta_info"]["finish_reason"]
        assert_same_logprobs([ours["meta_info"]["input_token_logprobs"]], [plain["meta_info"]["input_token_logprobs"]])
        assert_same_logprobs(*(each["meta_info"]["input_token_ids_logprobs"] for each in (ours, plain)))


def assert_same_logprobs(ours: list[Any], plain: list[Any]) -> None:
    for row, reference in zip(ours, plain, strict=True):
        for (value, token, *_), (other, same, *_) in zip(row or [], reference or [], strict=True):
            assert token == same
            assert value == pytest.approx(other, abs=1e-4)  # float32 logits of a block against those of one token


def test_sampled_log_probabilities_are_those_of_the_law_before_filters(dflash_hybrid: Server) -> None:
    """SGLang reports log softmax(logits / temperature); the chosen token's must be the one in the full list."""
    params = {"temperature": 0.7, "top_p": 0.9, "max_new_tokens": 20, "sampling_seed": 5}
    (found,) = answers(dflash_hybrid, corpus(PAIR, 1), params, return_logprob=True, top_logprobs_num=200)
    meta = found["meta_info"]
    for (value, token, _), top in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
        by_token = {entry[1]: entry[0] for entry in top}
        assert by_token[token] == pytest.approx(value, abs=1e-6)


def test_what_cannot_be_returned_is_refused_by_name(dflash_hybrid: Server) -> None:
    params = {"temperature": 0, "max_new_tokens": 4}
    response = raw(dflash_hybrid, corpus(PAIR, 1), params, return_sampling_mask=True)
    assert response.status_code == 400
    assert "return_sampling_mask" in response.text and "Fix: " in response.text


# Sampling parameters that ended the scheduler; and good ones, though no token has the second stop token's number,
# an index all the same.
HOSTILE: list[dict[str, Any]] = [
    {"top_k": 1 << 40},
    {"logit_bias": {"3": 1e39}},
    {"repetition_penalty": 1e-300},
    {"temperature": 1e300},
]
GOOD: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "min_new_tokens": 4, "stop_token_ids": [7, 10**9]}


def test_hostile_parameters_are_refused_by_name_and_their_neighbours_answered(dflash_hybrid: Server) -> None:
    def ask(params: dict[str, Any]) -> httpx.Response:
        return raw(dflash_hybrid, [range(20, 40)], {"max_new_tokens": 24, **params})

    alone = tokens(ask(GOOD).json())
    with ThreadPoolExecutor(16) as pool:
        asked = [params for bad in HOSTILE for params in (GOOD, bad)]
        found = list(zip(asked, pool.map(ask, asked), strict=True))
    for params, answer in (*found, (GOOD, ask(GOOD))):
        if params is GOOD:
            assert tokens(answer.json()) == alone
        else:
            assert answer.status_code == 400, params
            assert next(iter(params)) in answer.text and "Fix: " in answer.text


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments, environment",
    [
        (("--disable-overlap-schedule",), {}),
        (("--chunked-prefill-size", "64", "--enable-mixed-chunk"), {}),
        ((), {"SGLANG_TEST_RETRACT": "1"}),
        ((), strict()),
    ],
)
def test_every_case_under_other_schedules(
    arguments: tuple[str, ...], environment: dict[str, str], plain_hybrid: Server, tmp_path: Path
) -> None:
    environment = with_plugin(tmp_path) | environment
    with dflash_server(PAIR, tmp_path, *arguments, base=FEATURES, block=8, **environment) as server:
        for name in CASES:
            body, expected = body_and_expected(plain_hybrid, name)
            assert tokens(answers(server, corpus(PAIR, PROMPTS), **body)) == tokens(expected), name
        assert_nothing_leaked(server)
