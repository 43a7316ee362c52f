"""Where an answer ends, and what the next turn builds on, are plain decoding's, wherever in a block the end lies."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import transformers

from sglang_dflash_lab.pairs import target_path
from tests.support.generation import answers, flush, tokens
from tests.support.prompts import corpus
from tests.support.servers import FEATURES, Server, dflash_server

pytestmark = pytest.mark.engine

PAIR, PROMPTS, NEW_TOKENS, TRACK = "tiny-hybrid", 8, 64, 64
LOGPROBS = {"return_logprob": True, "top_logprobs_num": 2}
Params = dict[str, Any]


@cache
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(target_path(PAIR))


class Answer:
    """A plain answer, and two of its words at most ten tokens apart, so that one block may hold both."""

    def __init__(self, ids: list[int], rng: random.Random) -> None:
        self.ids, pieces = ids, [tokenizer().decode([token]) for token in ids]
        starts = [i for i, piece in enumerate(pieces) if re.fullmatch(r"\s?\w+", piece)]
        self.at = rng.choice(starts[1:-2] or [1])
        later = [i for i in starts if self.at < i <= self.at + 10] or [self.at + 1]
        self.early, self.late = pieces[self.at], pieces[rng.choice(later)]


def _pattern(word: str) -> str:
    return re.escape(word) + r"\b"


# Kind of end -> sampling parameters for an answer.
ENDS: dict[str, Callable[[Answer], Params]] = {
    "string": lambda a: {"stop": [a.late]},
    "two strings": lambda a: {"stop": [a.late, a.early]},
    "strings kept": lambda a: {"stop": [a.late, a.early], "no_stop_trim": True},
    "token before string": lambda a: {"stop_token_ids": [a.ids[a.at]], "stop": [a.late]},
    "two patterns": lambda a: {"stop_regex": [_pattern(a.late), _pattern(a.early)]},
    "string and pattern": lambda a: {"stop": [a.late], "stop_regex": [_pattern(a.early)]},
    "pattern at the window's edge": lambda a: {"stop_regex": [r"\b[a-z]{3}\b"]},
    "minimum and string": lambda a: {"stop": [a.late, a.early], "min_new_tokens": a.at + 2},
    "cap": lambda a: {"max_new_tokens": a.at + 1, "stop": [a.late]},
    "end of text": lambda a: {},
    "end ignored": lambda a: {"ignore_eos": True, "stop": [a.late, a.early]},
    "grammar": lambda a: {"regex": "[a-z]{3} [a-z]{5}", "stop": [a.late]},
}


GREEDY = {"temperature": 0, "max_new_tokens": NEW_TOKENS}


@cache
def greedy(plain: Server) -> list[list[int]]:
    return tokens(answers(plain, corpus(PAIR, PROMPTS), GREEDY))


def params_of(kind: str, plain: Server) -> list[Params]:
    rng = random.Random(kind)
    return [{**GREEDY, **ENDS[kind](Answer(ids, rng))} for ids in greedy(plain)]


def seen(answer: dict[str, Any]) -> dict[str, Any]:
    """What a client sees of an answer; of log-probabilities the tokens."""
    meta = answer["meta_info"]
    counts = ("finish_reason", "prompt_tokens", "completion_tokens", "cached_tokens", "reasoning_tokens")
    chosen = [token for _, token, *_ in meta.get("output_token_logprobs", ())]
    return {"text": answer["text"], "ids": answer["output_ids"], "chosen": chosen, **{key: meta[key] for key in counts}}


@cache
def two_turns(server: Server, kind: str, plain: Server) -> list[dict[str, Any]]:
    """Answers that end, and one more token after each with what was seen and 30 tokens more, from an empty cache."""
    flush(server)
    prompts, params = corpus(PAIR, PROMPTS), params_of(kind, plain)
    first = answers(server, prompts, params, **LOGPROBS)
    following = [[*p, *a["output_ids"], *range(200, 230)] for p, a in zip(prompts, first, strict=True)]
    second = [seen(answer) for answer in answers(server, following, {"temperature": 0, "max_new_tokens": 4})]
    for answer in second:
        # Of an answer that ends at a track boundary the last token's state exists here, and not in plain decoding.
        answer["cached_tokens"] = min(answer["cached_tokens"], (answer["prompt_tokens"] - 31) // TRACK * TRACK)
    return [*map(seen, first), *second]


# Every kind, fed to SGLang's own code without a server: ``tests/features/test_runs_of_tokens.py``.
QUICK = ("two strings", "string and pattern", "grammar")


@pytest.mark.parametrize("kind", [k if k in QUICK else pytest.param(k, marks=pytest.mark.slow) for k in ENDS])
def test_an_answer_ends_and_continues_as_plain_decodings(kind: str, server: Server, plain_hybrid: Server) -> None:
    ours, plain = (two_turns(each, kind, plain_hybrid) for each in (server, plain_hybrid))
    for mine, theirs in zip(ours, plain, strict=True):
        assert mine == theirs
    if kind not in ("end of text", "grammar"):
        assert [each["ids"] for each in plain[:PROMPTS]] != greedy(plain_hybrid), "nothing ended early"


MORE = [*range(200, 206)]


def turns(server: Server, kind: str, plain: Server, *, streaming: bool) -> list[Any]:
    """Sessions whose first turn ends by ``kind``: what their next turns saw as prompt, and answered."""
    found = []
    for prompt, params in list(zip(corpus(PAIR, PROMPTS), params_of(kind, plain), strict=True))[:3]:
        session = server.post("/open_session", {"capacity_of_str_len": 1000, "streaming": streaming}).json()

        def ask(ids: list[int], params: Params, session: str = session, **more: Any) -> Any:
            body = {"input_ids": ids, "sampling_params": params, "session_params": {"id": session, **more}}
            answer = server.post("/generate", body).json()
            found.append((answer["text"], answer["output_ids"], answer["meta_info"]["prompt_tokens"]))
            return answer

        first, short = ask(prompt, params), {"temperature": 0, "max_new_tokens": 8}
        if streaming:  # each turn follows the one before
            for end in ({}, {"stop_regex": ["[a-z]"]}, {}):
                ask(MORE, {**short, **end})
        else:  # branches of the first turn
            seen_end = len(prompt) + len(first["output_ids"])
            for change in ({}, {}, {"drop_previous_output": True}, {"offset": seen_end - 2}, {"replace": True}):
                ask(MORE, short, rid=first["meta_info"]["id"], **change)
        server.post("/close_session", {"session_id": session})
    return found


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    "kind",
    ["two strings", *(pytest.param(each, marks=pytest.mark.slow) for each in ("token before string", "end of text"))],
)
def test_a_session_continues_with_what_its_client_saw(
    kind: str, streaming: bool, server: Server, plain_hybrid: Server
) -> None:
    ours, plain = (turns(each, kind, plain_hybrid, streaming=streaming) for each in (server, plain_hybrid))
    assert ours == plain


@pytest.mark.slow
@pytest.mark.parametrize("interval", [64, 256])
def test_a_streaming_turn_recomputes_less_than_a_track_interval(interval: int, tmp_path: Path) -> None:
    """Prints what ``docs/internals/replay.md`` shows."""
    rng, recomputed = random.Random(1), []
    with dflash_server(PAIR, tmp_path, "--mamba-track-interval", str(interval), base=FEATURES) as server:
        for _ in range(3):
            session, held = server.post("/open_session", {"capacity_of_str_len": 100000, "streaming": True}).json(), 0
            for _ in range(12):
                ids = [rng.randrange(20, 900) for _ in range(rng.randrange(10, 60))]
                params = {"temperature": 0, "max_new_tokens": rng.randrange(24, 80), "ignore_eos": True}
                body = {"input_ids": ids, "sampling_params": params, "session_params": {"id": session}}
                meta = server.post("/generate", body).json()["meta_info"]
                recomputed += [held - meta["cached_tokens"]] if held else []
                held = meta["prompt_tokens"] + meta["completion_tokens"]
    print(f"{interval}: {sum(recomputed) / len(recomputed):.1f} tokens recomputed per turn, {max(recomputed)} at most")
    assert 0 < max(recomputed) < interval
