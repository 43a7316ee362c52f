"""What SGLang does with each token of a request, it does with several at once through our hooks."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("sglang")

from sglang.srt.constrained import base_grammar_backend as grammars
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.hf_transformers_utils import get_tokenizer

from sglang_dflash.errors import DFlashError
from sglang_dflash.features import requests
from sglang_dflash_lab.pairs import target_path

pytestmark = pytest.mark.sglang

TOKENIZER = get_tokenizer(str(target_path("tiny-hybrid")))
VOCABULARY, EOS, THINK_START, THINK_END = len(TOKENIZER), 2, [5, 6], [9, 10]
WORDS = TOKENIZER("the cat has 4 apples and the dog is 12 years old. One, two!")["input_ids"]


class Grammar:
    """Ends after a number of tokens, all of which it has read before SGLang looks for an end."""

    def __init__(self, length: int) -> None:
        self.left = length

    def read(self, run: list[int]) -> list[int]:
        read = run[: self.left]
        self.left -= len(read)
        return read

    def is_terminated(self) -> bool:
        return self.left <= 0


def request(params: dict[str, Any], grammar: int | None) -> Any:
    req = Req.__new__(Req)
    req.sampling_params = SamplingParams(**params)
    req.sampling_params.normalize(TOKENIZER)
    req.rid, req.output_ids, req.origin_input_ids, req.tokenizer = "r", array("q"), array("q"), TOKENIZER
    req.finished_reason = req.finished_len = req.to_finish = None
    req.vocab_size, req.eos_token_ids, req.decoded_text = VOCABULARY, {EOS}, ""
    req.grammar = None if grammar is None else Grammar(grammar)
    req.reasoning_tokens = req._think_end_match_len = req._think_start_match_len = 0
    req._think_end_matcher, req._is_reasoning_over = None, False
    return req


def feed(req: Any, tokens: list[int], runs: list[int], update: Any, opens: bool) -> Any:
    """Feed tokens in runs as ``process_batch_result_decode`` does, and return what a client sees."""
    start = 0
    for length in runs:
        run = tokens[start : start + length]
        start += length
        if req.grammar is not None:
            run = req.grammar.read(run)
        if not run or req.finished():
            break
        req.output_ids.extend(run)
        if opens:
            req.update_self_opened_reasoning_tokens(run, THINK_START, THINK_END)
        else:
            req.update_reasoning_tokens(run, THINK_END)
        update(req, len(run))
    reason = req.finished_reason and req.finished_reason.to_json()
    return reason, list(req.output_ids_through_stop), req.reasoning_tokens


texts = st.lists(st.sampled_from([*WORDS, EOS, *THINK_START, *THINK_END, VOCABULARY + 7]), min_size=1, max_size=40)
stops = st.lists(st.sampled_from(["the", " cat", "4", "is 1", "s", "old.", "One", "o", " "]), max_size=3)
patterns = st.lists(
    st.sampled_from([r"\b[a-z]{3}\b", "[0-9]$", "[a-z]+ [a-z]+", "cat|dog", r"\.", "the(?= cat)", r"\d+"]), max_size=2
)


@given(
    texts, st.lists(st.integers(1, 16), min_size=40, max_size=40), stops, patterns,
    st.lists(st.sampled_from(WORDS), max_size=1), st.integers(1, 45), st.booleans(), st.none() | st.integers(1, 30),
    st.booleans(),
)  # fmt: skip
def test_a_request_ends_where_it_ends_token_by_token(
    tokens: list[int], runs: list[int], strings: list[str], regexes: list[str], token_stops: list[int],
    cap: int, ignores_eos: bool, grammar: int | None, opens: bool,
) -> None:  # fmt: skip
    params = {"stop": strings, "stop_regex": regexes, "stop_token_ids": token_stops, "max_new_tokens": cap}
    params["ignore_eos"] = ignores_eos

    def ours(req: Any, length: int) -> None:
        requests.end_at_first_token(Req.update_finish_state, req, length)

    found = feed(request(params, grammar), tokens, runs, ours, opens)
    expected = feed(request(params, grammar), tokens, [1] * len(tokens), Req.update_finish_state, opens)
    if expected[0] is None:  # the runs may end later
        found, expected = found[:1], expected[:1]
    assert found == expected


def test_the_end_of_a_request_leaves_the_tokens_that_the_cache_holds() -> None:
    req = request({"stop": ["cat", "the"], "max_new_tokens": 20}, None)
    req.output_ids.extend(WORDS)
    requests.end_at_first_token(Req.update_finish_state, req, len(WORDS))
    assert list(req.output_ids) == WORDS and req.finished_len == 1
    requests.forget_unseen_tokens(req)
    assert list(req.output_ids) == WORDS[:1]


class Irrevocable(grammars.BaseGrammarBackend):
    """A plugin's backend whose grammars cannot be rolled back."""

    def dispatch_regex(self, key_string: str) -> Any:
        return type("Forward", (grammars.BaseGrammarObject,), {})()


def test_a_backend_without_rollback_is_refused_whatever_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "get_exec", lambda: SimpleNamespace(kernel=SimpleNamespace(grammar_backend="mine")))
    with pytest.raises(DFlashError, match="--grammar-backend mine: Forward has no rollback"):
        requests.refuse_without_rollback(Irrevocable())
    wrapped = SimpleNamespace(grammar_backend=Irrevocable())  # as SGLang wraps it for a reasoning parser
    with pytest.raises(DFlashError, match="has no rollback"):
        requests.refuse_without_rollback(wrapped)
    requests.refuse_without_rollback(None)
    able = type("Able", (grammars.BaseGrammarObject,), {"rollback": lambda self, k: None})
    requests.refuse_without_rollback(SimpleNamespace(dispatch_regex=lambda pattern: able()))
