"""Whatever a greedy request asks for, DFLASH answers as plain decoding does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from sglang.srt.sampling import custom_logit_processor

from sglang_dflash.pairs import target_path
from tests.support.generation import answers, assert_nothing_leaked, raw, tokens
from tests.support.pair_servers import FEATURES, STRICT, dflash_server
from tests.support.prompts import corpus
from tests.support.servers import Server

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
# Processors of SGLang's own: one forbids what its parameters list, the other looks at what its request has generated.
PROCESSORS = {
    "custom processor": "DisallowedTokensLogitsProcessor",
    "custom processor that looks back": "DeepseekOCRNoRepeatNGramLogitProcessor",
}


def body_of(name: str, greedy: list[list[int]]) -> dict[str, Any]:
    """The request under test; ``greedy`` are the prompts' plain continuations, so that constraints bite."""
    common = [token for answer in greedy for token in answer]
    commonest = sorted(set(common), key=lambda token: (-common.count(token), token))[:6]
    often, middle = commonest[0], greedy[0][NEW_TOKENS // 2]
    # The target is sure of the text it knows. Without its commonest tokens it is not, and a penalty changes its mind.
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
        "json schema": {"json_schema": SCHEMA},
        "regex": {"regex": "[a-z]{3,10} (is|was) [0-9]{1,3}\\."},
        "ebnf": {"ebnf": 'root ::= "a" ("b" | "cd"){2,9} "e"'},
        "regex and penalty": {"regex": "[a-z ]{20,40}", "frequency_penalty": 1.0},
    }
    body: dict[str, Any] = {"params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, **params[name]}}
    if name in PROCESSORS:
        body["custom_logit_processor"] = getattr(custom_logit_processor, PROCESSORS[name]).to_str()
    return body


CASES = (
    "nothing special",
    "frequency penalty",
    "presence penalty",
    "repetition penalty",
    "all penalties",
    "minimum length",
    "minimum length and penalty",
    "logit bias",
    "stop token",
    "stop string",
    "end ignored",
    "custom processor",
    "custom processor that looks back",
    "json schema",
    "regex",
    "ebnf",
    "regex and penalty",
)


def text_of(ids: list[int]) -> str:
    tokenizer = transformers.AutoTokenizer.from_pretrained(target_path(PAIR))
    return str(tokenizer.decode(ids))


@pytest.fixture(scope="module")
def expected(plain_hybrid: Server) -> dict[str, Any]:
    """Plain decoding's answers to every case, and its log-probabilities."""
    prompts = corpus(PAIR, PROMPTS)
    params = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    greedy = tokens(answers(plain_hybrid, prompts, params))
    found: dict[str, Any] = {"greedy": greedy}
    for name in CASES:
        found[name] = answers(plain_hybrid, prompts, **body_of(name, greedy))
    found["log-probabilities"] = answers(plain_hybrid, prompts, **LOGPROBS)
    return found


@pytest.fixture(params=["dflash_hybrid", "random_widths_hybrid"])
def server(request: pytest.FixtureRequest) -> Server:
    """Full blocks, and blocks of any width."""
    served: Server = request.getfixturevalue(request.param)
    return served


@pytest.mark.parametrize("name", CASES)
def test_the_answer_is_plain_decodings(name: str, server: Server, expected: dict[str, Any]) -> None:
    found = answers(server, corpus(PAIR, PROMPTS), **body_of(name, expected["greedy"]))
    assert tokens(found) == tokens(expected[name])
    for ours, plain in zip(found, expected[name], strict=True):
        assert ours["text"] == plain["text"]
        assert ours["meta_info"]["finish_reason"] == plain["meta_info"]["finish_reason"]
    if name != "nothing special":
        without = "logit bias" if "penalt" in name and "regex" not in name else "nothing special"
        assert tokens(found) != tokens(expected[without]), "the case constrains nothing"


def test_the_accept_rate_is_over_verified_drafts(random_widths_hybrid: Server) -> None:
    params = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    for answer in answers(random_widths_hybrid, corpus(PAIR, PROMPTS), params):
        meta = answer["meta_info"]
        steps, drafts = meta["spec_verify_ct"], meta["spec_num_proposed_drafts"]
        assert drafts == round((meta["spec_cap_length"] - 1) * steps) < 15 * steps
        assert meta["spec_accept_rate"] == meta["spec_num_correct_drafts"] / drafts


def test_schema_answers_parse(expected: dict[str, Any], dflash_hybrid: Server) -> None:
    params = {"temperature": 1.0, "max_new_tokens": 200, "json_schema": SCHEMA}
    found = answers(dflash_hybrid, corpus(PAIR, 12), [{**params, "sampling_seed": i} for i in range(12)])
    for answer in found:
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"
        assert json.loads(answer["text"]).keys() == {"name", "age"}


LOGPROBS: dict[str, Any] = {
    "params": {"temperature": 0, "max_new_tokens": NEW_TOKENS},
    "return_logprob": True,
    "logprob_start_len": 0,
    "top_logprobs_num": 4,
    "token_ids_logprob": [3, 77],
}


def test_log_probabilities_are_plain_decodings(server: Server, expected: dict[str, Any]) -> None:
    found = answers(server, corpus(PAIR, PROMPTS), **LOGPROBS)
    for ours, plain in zip(found, expected["log-probabilities"], strict=True):
        for field in ("input_token_logprobs", "output_token_logprobs"):
            assert_same_logprobs([ours["meta_info"][field]], [plain["meta_info"][field]])
        for field in ("input_top_logprobs", "output_top_logprobs", "output_token_ids_logprobs"):
            assert_same_logprobs(ours["meta_info"][field], plain["meta_info"][field])


def assert_same_logprobs(ours: list[Any], plain: list[Any]) -> None:
    assert len(ours) == len(plain)
    for row, reference in zip(ours, plain, strict=True):
        assert [entry[1] for entry in row or []] == [entry[1] for entry in reference or []]
        values = [(entry[0], other[0]) for entry, other in zip(row or [], reference or [], strict=True)]
        for value, other in values:
            assert value == pytest.approx(other, abs=1e-4)  # float32 logits of a block against those of one token


def test_sampled_log_probabilities_are_those_of_the_law_before_filters(dflash_hybrid: Server) -> None:
    """SGLang reports log softmax(logits / temperature); the chosen token's must be the one in the full list."""
    params = {"temperature": 0.7, "top_p": 0.9, "max_new_tokens": 20, "sampling_seed": 5}
    (found,) = answers(dflash_hybrid, corpus(PAIR, 1), params, return_logprob=True, top_logprobs_num=200)
    meta = found["meta_info"]
    for (value, token, _), top in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
        by_token = {entry[1]: entry[0] for entry in top}
        assert by_token[token] == pytest.approx(value, abs=1e-6)


def streamed(server: Server, prompt: list[int]) -> list[list[int]]:
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
        "stream": True,
    }
    lines = server.post("/generate", body).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return [chunk["output_ids"] for chunk in chunks]


def test_a_stream_grows_in_order_to_the_same_tokens(dflash_hybrid: Server, expected: dict[str, Any]) -> None:
    chunks = streamed(dflash_hybrid, corpus(PAIR, 1)[0])
    assert len(chunks) > 1
    joined = [token for chunk in chunks for token in chunk]
    if chunks[-1][: len(chunks[0])] == chunks[0] and len(chunks[-1]) == NEW_TOKENS:  # cumulative chunks
        for shorter, longer in zip(chunks, chunks[1:], strict=False):
            assert longer[: len(shorter)] == shorter
        joined = chunks[-1]
    assert joined == expected["greedy"][0]


def test_parallel_samples_share_a_prompt(dflash_hybrid: Server, expected: dict[str, Any]) -> None:
    params = {**body_of("logit bias", expected["greedy"])["params"], "temperature": 1.5, "n": 6}
    found = answers(dflash_hybrid, corpus(PAIR, 1), params)
    assert len(found) == 6
    assert len({tuple(answer["output_ids"]) for answer in found}) > 1


@pytest.mark.parametrize("body", [{"return_hidden_states": True}, {"return_sampling_mask": True}])
def test_what_cannot_be_returned_is_refused_by_name(dflash_hybrid: Server, body: dict[str, Any]) -> None:
    response = raw(dflash_hybrid, corpus(PAIR, 1), {"temperature": 0, "max_new_tokens": 4}, **body)
    assert response.status_code == 400
    assert next(iter(body)) in response.text and "Remedy" in response.text


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments, environment",
    [
        (("--disable-overlap-schedule",), {}),
        (("--chunked-prefill-size", "64", "--enable-mixed-chunk"), {}),
        ((), {"SGLANG_TEST_RETRACT": "1"}),
        ((), STRICT),
    ],
)
def test_every_case_under_other_schedules(
    arguments: tuple[str, ...], environment: dict[str, str], expected: dict[str, Any], tmp_path: Path
) -> None:
    with dflash_server(PAIR, tmp_path, *arguments, base=FEATURES, block=8, **environment) as server:
        for name in CASES:
            found = answers(server, corpus(PAIR, PROMPTS), **body_of(name, expected["greedy"]))
            assert tokens(found) == tokens(expected[name]), name
        assert_nothing_leaked(server)
