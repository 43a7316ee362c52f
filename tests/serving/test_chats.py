"""Chats as clients hold them: streams, thoughts, schemas and calls are plain decoding's, joined from fewer pieces."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.support.catalogue import BODIES, CALLS, body_of
from tests.support.chats import events, seen
from tests.support.servers import Server

pytestmark = pytest.mark.engine

QUESTIONS = [
    f"{name} has {n} apples and buys {n + 4} more. How many apples now?"
    for n, name in enumerate(("Tom", "Ann", "Leo", "Zoe"))
]


def split(found: dict[str, Any]) -> tuple[dict[str, Any], list[float]]:
    """What is equal, and log-probabilities, which rounding changes."""
    scores = found["scores"]
    return {**found, "scores": [(token, others) for token, _, others in scores]}, [value for _, value, _ in scores]


def asked(server: Server, kind: str, **more: Any) -> list[httpx.Response]:
    with ThreadPoolExecutor(4) as pool:
        bodies = [body_of(kind, question, **more) for question in QUESTIONS]
        answers = list(pool.map(lambda body: server.post("/v1/chat/completions", body), bodies))
    assert all(answer.status_code == 200 for answer in answers), [answer.text for answer in answers]
    return answers


QUICK = ("ends", "schema", "two calls")
KINDS = [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in BODIES]


@pytest.mark.parametrize("kind", KINDS)
def test_a_chat_is_plain_decodings_whole_and_streamed(kind: str, server: Server, plain_hybrid: Server) -> None:
    for way in ({}, {"stream": True, "stream_options": {"include_usage": True}}):
        ours, plain = (asked(each, kind, **way) for each in (server, plain_hybrid))
        for one, other in zip(ours, plain, strict=True):
            (mine, values), (theirs, expected) = split(seen(one)), split(seen(other))
            assert mine == theirs, way
            assert values == pytest.approx(expected, abs=0.002)
        if kind in CALLS:
            assert any(seen(each)["calls"] for each in ours), "no call was parsed"
    # Plain decoding sends an event a token, and those of the role, the end and the counts; it may join tokens.
    most = [max(len(events(each)), seen(each)["usage"]["completion_tokens"] + 3) for each in plain]
    assert all(len(events(each)) <= bound for each, bound in zip(ours, most, strict=True))
