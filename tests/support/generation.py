"""Requests to ``/generate``, their answers, and where two greedy texts of one target may diverge by rounding.

In bfloat16 the forward of a block rounds differently from the forward of one token. DFLASH and plain decoding may
therefore choose differently at a near-tie of the target's two most likely tokens, and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from tests.support.servers import Server

# Logits of 16 to 32 are 0.125 apart in bfloat16; each of two may be off by two such steps.
BF16_GAP = 0.5
# Share of the texts that may diverge at a near-tie.
SHARE = 0.25

Params = dict[str, Any]
Top = Sequence[tuple[float, int]]


@dataclass(frozen=True)
class Answer:
    """One generation: its new tokens and SGLang's ``meta_info``."""

    tokens: list[int]
    meta: dict[str, Any]


def generate(server: Server, prompt: Sequence[int], max_new_tokens: int = 64, **body: Any) -> Answer:
    """Send one request, greedy unless ``sampling_params`` of ``body`` override it."""
    sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, **body.get("sampling_params", {})}
    response = server.post("/generate", {**body, "input_ids": list(prompt), "sampling_params": sampling})
    assert response.status_code == 200, response.text
    answer = response.json()
    return Answer(answer["output_ids"], answer["meta_info"])


def generate_all(
    server: Server,
    inputs: Sequence[Sequence[int]],
    concurrency: int,
    max_new_tokens: int = 64,
    each: Callable[[int], Params] = lambda i: {},
    **body: Any,
) -> list[Answer]:
    """Send every prompt once, ``concurrency`` at a time; ``each`` gives more keys of a request, by its number."""

    def ask(i: int) -> Answer:
        return generate(server, inputs[i], max_new_tokens, **body, **each(i))

    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(ask, range(len(inputs))))


def answers(
    server: Server, prompts: Sequence[Sequence[int]], params: Params | Sequence[Params], **body: Any
) -> list[dict[str, Any]]:
    """Send one request holding every prompt; ``params`` for all of them or one for each."""
    response = raw(server, prompts, params, **body)
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = response.json()
    return found


def raw(
    server: Server, prompts: Sequence[Sequence[int]], params: Params | Sequence[Params], **body: Any
) -> httpx.Response:
    return server.post("/generate", {"input_ids": [list(p) for p in prompts], "sampling_params": params, **body})


def tokens(found: Sequence[dict[str, Any]]) -> list[list[int]]:
    return [answer["output_ids"] for answer in found]


def counted(found: Sequence[Answer]) -> list[tuple[list[int], int]]:
    """Tokens, and the steps that they took: tokens alone would be right with any drafts."""
    return [(answer.tokens, answer.meta["spec_verify_ct"]) for answer in found]


def tokens_per_step(found: Sequence[Answer]) -> float:
    """Tokens per verify step."""
    return sum(len(answer.tokens) for answer in found) / sum(answer.meta["spec_verify_ct"] for answer in found)


def flush(server: Server) -> None:
    """Empty the prefix cache. SGLang refuses while a request runs, such as the health check at a slow start."""
    assert (answer := server.post("/flush_cache?timeout=60")).status_code == 200, answer.text


def assert_nothing_leaked(server: Server) -> None:
    """Assert that the server survives idling: SGLang checks its KV and state slots then, and exits if some leaked."""
    flush(server)
    assert server.get("/health_generate").status_code == 200
    state = server.get("/server_info").json()["internal_states"][0]
    assert state["sglang_dflash"]["version"]


def divergence(ours: Sequence[int], plain: Sequence[int], tops: Sequence[Top], gap: float) -> int | None:
    """Return the first position at which two texts differ; None if they are equal.

    Args:
        ours: new tokens.
        plain: the target's own.
        tops: for each of ``plain``, the largest log-probabilities before it and their tokens, the largest first.
        gap: nats within which the two count as tied.

    Raises:
        AssertionError: the texts diverge where these two tokens are no near-tie with the likeliest.
    """
    assert len(tops) == len(plain), (len(tops), len(plain))
    for position, (our_token, token, top) in enumerate(zip(ours, plain, tops, strict=False)):
        if our_token != token:
            (best, _), values = top[0], {candidate: value for value, candidate in top}
            apart = best - min(values.get(our_token, -math.inf), values.get(token, -math.inf))
            assert apart < gap, f"token {position}: {our_token} for {token}, {apart:.3f} apart: {top}"
            return position
    assert len(ours) == len(plain), f"{len(ours)} tokens for {len(plain)}"
    return None


def tops_of(answer: Answer) -> list[Top]:
    """Return per new token the requested log-probabilities and tokens."""
    return [[(value, token) for value, token, *_ in top] for top in answer.meta["output_top_logprobs"]]


def assert_diverging_only_at_near_ties(ours: Sequence[Answer], plain: Sequence[Answer]) -> None:
    """Assert that texts diverge from plain decoding's at near-ties only, and at most ``SHARE`` of them.

    Args:
        plain: generated with ``return_logprob`` and ``top_logprobs_num`` of two or more.
    """
    diverged = [
        divergence(ours_answer.tokens, answer.tokens, tops_of(answer), BF16_GAP) is not None
        for ours_answer, answer in zip(ours, plain, strict=True)
    ]
    print(f"{sum(diverged)} of {len(diverged)} texts diverge at a near-tie")
    assert sum(diverged) <= SHARE * len(diverged), f"{sum(diverged)} of {len(diverged)} texts diverge"
