"""Greedy requests of every kind: DFLASH answers as plain decoding does, and refuses by name what it cannot return."""

from __future__ import annotations

import itertools
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import transformers

from sglang_dflash_lab.bench.tasks import load
from sglang_dflash_lab.pairs import target_path
from tests.support.catalogue import BAD, NEW_TOKENS, PROCESSORS, parameters
from tests.support.generation import answers, assert_nothing_leaked, raw, tokens
from tests.support.prompts import corpus, message_ids, random_prompts
from tests.support.servers import FEATURES, RANDOM_WIDTHS, Server, dflash_server, strict, with_plugin

pytestmark = pytest.mark.engine

PAIR = "tiny-hybrid"
PROMPTS = 6
CASES = tuple(parameters([], 0, ""))
QUICK = ("nothing special", "all penalties", "stop string", "json schema", *PROCESSORS)


@cache
def bodies(plain: Server) -> dict[str, dict[str, Any]]:
    """Requests by case, from the prompts' plain continuations, so that constraints bite."""
    params = {"temperature": 0, "max_new_tokens": NEW_TOKENS}
    greedy = tokens(answers(plain, corpus(PAIR, PROMPTS), {**params, "ignore_eos": True}))
    commonest = [token for token, _ in Counter(itertools.chain(*greedy)).most_common(6)]
    middle = greedy[0][NEW_TOKENS // 2]
    word = str(transformers.AutoTokenizer.from_pretrained(target_path(PAIR)).decode([middle]))
    return {
        name: {"params": {**params, **more}, "custom_logit_processor": PROCESSORS.get(name)}
        for name, more in parameters(commonest, middle, word).items()
    }


def end(answer: dict[str, Any]) -> tuple[list[int], str, Any]:
    return answer["output_ids"], answer["text"], answer["meta_info"]["finish_reason"]


@cache
def body_and_expected(plain: Server, name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The body of a case, and plain decoding's answers to it."""
    body = bodies(plain)[name]
    return body, answers(plain, corpus(PAIR, PROMPTS), **body)


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_the_answer_is_plain_decodings(name: str, server: Server, plain_hybrid: Server) -> None:
    body, expected = body_and_expected(plain_hybrid, name)
    found = answers(server, corpus(PAIR, PROMPTS), **body)
    assert list(map(end, found)) == list(map(end, expected))
    if name != "nothing special":
        without = "logit bias" if "penalt" in name and "regex" not in name else "nothing special"
        assert tokens(found) != tokens(body_and_expected(plain_hybrid, without)[1]), "the case constrains nothing"


LOGPROBS = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 4, "token_ids_logprob": [3, 77]}


def test_log_probabilities_are_plain_decodings(server: Server, plain_hybrid: Server) -> None:
    """Every second request is for no token: it is scored, and samples nothing."""
    params = [{"temperature": 0, "max_new_tokens": limit} for limit in (NEW_TOKENS, 0)] * PROMPTS
    found, expected = (answers(each, corpus(PAIR, 2 * PROMPTS), params, **LOGPROBS) for each in (server, plain_hybrid))
    for ours, plain, asked in zip(found, expected, params, strict=True):
        assert ours["output_ids"] == plain["output_ids"] and bool(ours["output_ids"]) == bool(asked["max_new_tokens"])
        mine, theirs = ours["meta_info"], plain["meta_info"]
        assert mine["finish_reason"] == theirs["finish_reason"]
        fields = [field for field in theirs if field.endswith("logprobs")]
        assert len(fields) == 6
        for field in fields:
            single = field.endswith("token_logprobs")
            assert_same_logprobs(*([each[field]] if single else each[field] for each in (mine, theirs)))


def assert_same_logprobs(ours: list[Any], plain: list[Any]) -> None:
    for row, reference in zip(ours, plain, strict=True):
        for (value, token, *_), (other, same, *_) in zip(row or [], reference or [], strict=True):
            assert token == same
            assert value == pytest.approx(other, abs=1e-4)  # float32 logits of a block against those of one token


def test_sampled_log_probabilities_are_those_of_the_law_before_filters(dflash_hybrid: Server) -> None:
    """SGLang reports log softmax(logits / temperature); the chosen token's must be the one in the full list."""
    params = {"temperature": 0.7, "top_p": 0.9, "max_new_tokens": 20, "sampling_seed": 5}
    (found,) = answers(dflash_hybrid, corpus(PAIR, 1), params, return_logprob=True, top_logprobs_num=200)
    assert tokens(answers(dflash_hybrid, corpus(PAIR, 1), params)) == tokens([found])
    meta = found["meta_info"]
    for (value, token, _), top in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
        by_token = {entry[1]: entry[0] for entry in top}
        assert by_token[token] == pytest.approx(value, abs=1e-6)


def test_sampling_masks_are_plain_decodings(server: Server, plain_hybrid: Server) -> None:
    """Plain decoding draws other tokens, so it returns the mask of each position after the tokens before it.

    Requests with a mask, greedy and sampled, share a batch with others.
    """
    filters = [{"top_k": 1}, {"top_k": 12, "top_p": 0.97}, {"top_k": 40, "min_p": 0.01}, {"top_p": 0.9}]
    params = [{"temperature": 1.5, "max_new_tokens": NEW_TOKENS, "sampling_seed": 3, **each} for each in filters]
    body = {"return_sampling_mask": [True, True, True, False]}
    body["sampling_logprobs_mode"] = ["selected", "support", "selected", None]
    asked = [*message_ids(PAIR, load("repeat", 1)), *random_prompts(PAIR, 3)]
    found, wide = answers(server, asked, params, **body), 0
    assert "output_token_sampling_mask" not in found[3]["meta_info"]
    for i, (prompt, answer) in enumerate(zip(asked[:3], found[:3], strict=True)):
        text, meta = answer["output_ids"], answer["meta_info"]
        masks, logprobs = meta["output_token_sampling_mask"], meta["output_token_sampling_logprobs"]
        assert meta["output_token_sampling_mask_length"] == len(masks) == len(logprobs) == len(text)
        prompts = [[*prompt, *text[:n]] for n in range(len(text))]
        support = {"return_sampling_mask": True, "sampling_logprobs_mode": "support"}
        each = [a["meta_info"] for a in answers(plain_hybrid, prompts, {**params[i], "max_new_tokens": 1}, **support)]
        assert masks == [meta["output_token_sampling_mask"][0] for meta in each]
        for token, mask, mine, theirs in zip(text, masks, logprobs, each, strict=True):
            (all_logprobs,) = theirs["output_token_sampling_logprobs"]
            expected = all_logprobs if i == 1 else all_logprobs[mask.index(token)]
            assert mine == pytest.approx(expected, abs=1e-4)
        wide += sum(len(mask) > 1 for mask in masks)
    assert wide > 20 and len(found[0]["output_ids"]) > found[0]["meta_info"]["spec_verify_ct"] + 1


HOSTILE = [BAD[i] for i in (0, 3, 4, 7)]  # which JSON can hold
# No token has the second stop token's number.
GOOD: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "min_new_tokens": 4, "stop_token_ids": [7, 10**9]}


def test_hostile_parameters_are_refused_by_name_and_their_neighbours_answered(dflash_hybrid: Server) -> None:
    def ask(params: dict[str, Any]) -> httpx.Response:
        return raw(dflash_hybrid, [range(20, 40)], {"max_new_tokens": 24, **params})

    alone = tokens(ask(GOOD).json())
    with ThreadPoolExecutor(2 * len(HOSTILE)) as pool:
        good, bad = pool.map(ask, [GOOD] * len(HOSTILE)), pool.map(ask, HOSTILE)
    assert [tokens(answer.json()) for answer in (*good, ask(GOOD))] == [alone] * (len(HOSTILE) + 1)
    for params, answer in zip(HOSTILE, bad, strict=True):
        assert answer.status_code == 400 and "Fix: " in answer.text and next(iter(params)) in answer.text


# SGLang calls a processor for a token that a retraction drops: its state then differs.
STATELESS = tuple(case for case in CASES if case != "custom processor with state")


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments, environment, cases",
    [
        (("--disable-overlap-schedule",), {}, CASES),
        (("--chunked-prefill-size", "64", "--enable-mixed-chunk"), {}, CASES),
        (("--speculative-draft-window-size", "64", *RANDOM_WIDTHS), {}, CASES),
        ((), {"SGLANG_TEST_RETRACT": "1"}, STATELESS),
        ((), strict(), CASES),
    ],
)
def test_every_case_under_other_schedules(
    arguments: tuple[str, ...],
    environment: dict[str, str],
    cases: tuple[str, ...],
    plain_hybrid: Server,
    tmp_path: Path,
) -> None:
    environment = with_plugin(tmp_path) | environment
    with dflash_server(PAIR, tmp_path, *arguments, base=FEATURES, block=8, **environment) as server:
        for name in cases:
            body, expected = body_and_expected(plain_hybrid, name)
            found = answers(server, corpus(PAIR, PROMPTS), **body)
            assert list(map(end, found)) == list(map(end, expected)), name
        assert_nothing_leaked(server)
