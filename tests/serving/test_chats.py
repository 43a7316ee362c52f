"""Chats as clients hold them: streams, thoughts, schemas and calls are plain decoding's, joined from fewer pieces."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest

from tests.support.servers import Server

pytestmark = pytest.mark.engine

QUESTIONS = [
    f"{name} has {n} apples and buys {n + 4} more. How many apples now?"
    for n, name in enumerate(("Tom", "Ann", "Leo", "Zoe"))
]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": name, "parameters": {"type": "object", "properties": keys}},
    }
    for name, keys in (("add", {"a": {"type": "integer"}, "b": {"type": "integer"}}), ("now", {}))
]
ADD = r'<tool_call>\n\{"name": "add", "arguments": \{"a": 3, "b": [0-9][0-9]?\}\}\n</tool_call>'
NOW = r'<tool_call>\n\{"name": "now", "arguments": \{\}\}\n</tool_call>'
CALLS = {
    "one call": ADD,
    "two calls": rf"{ADD}\n{ADD}",
    "no arguments": NOW,
    "text and calls": rf"Let me see\.\n{ADD}\n{NOW}",
}
DIRECT = {"chat_template_kwargs": {"enable_thinking": False}}  # a grammar binds behind the thoughts
BODIES: dict[str, dict[str, Any]] = {
    "thoughts": {"max_tokens": 40},
    "cut thoughts": {"max_tokens": 3},
    "no thoughts": {**DIRECT, "logprobs": True, "top_logprobs": 3},
    "ends": {**DIRECT, "stop": ["apples", "3", "has"]},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
    "forced call": {"tools": TOOLS[:1], "tool_choice": "required", "max_tokens": 60},
    **{name: {**DIRECT, "tools": TOOLS, "regex": text, "max_tokens": 200} for name, text in CALLS.items()},
}


def body_of(kind: str, question: str, **more: Any) -> dict[str, Any]:
    message = {"role": "user", "content": question}
    return {"model": "m", "messages": [message], "temperature": 0, "max_tokens": 48, **BODIES[kind], **more}


def add(call: dict[str, Any], calls: dict[int, list[str]]) -> None:
    found = calls.setdefault(call["index"], ["", ""])
    for i, part in enumerate(("name", "arguments")):
        found[i] += call["function"].get(part) or ""


def whole(server: Server, kind: str, question: str) -> dict[str, Any]:
    response = server.post("/v1/chat/completions", body_of(kind, question))
    assert response.status_code == 200, response.text
    (choice,), usage = response.json()["choices"], response.json()["usage"]
    calls: dict[int, list[str]] = {}
    for index, call in enumerate(choice["message"].get("tool_calls") or ()):
        add({**call, "index": index}, calls)
    message, scores = choice["message"], (choice.get("logprobs") or {}).get("content") or []
    return {
        "content": message.get("content") or "",
        "reasoning": message.get("reasoning_content") or "",
        "calls": calls,
        "reason": choice["finish_reason"],
        "matched": choice.get("matched_stop"),
        "scores": [(each["token"], round(each["logprob"], 3), len(each["top_logprobs"])) for each in scores],
        "usage": {key: usage.get(key) for key in ("prompt_tokens", "completion_tokens", "reasoning_tokens")},
    }


def streamed(server: Server, kind: str, question: str) -> dict[str, Any]:
    """The same, joined from a stream, and the number of its chunks."""
    found: dict[str, Any] = {"content": "", "reasoning": "", "scores": [], "chunks": 0, "matched": None}
    calls: dict[int, list[str]] = {}
    body = body_of(kind, question, stream=True, stream_options={"include_usage": True})
    with httpx.stream("POST", server.url + "/v1/chat/completions", json=body, timeout=600) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if usage := chunk.get("usage"):
                found["usage"] = {k: usage.get(k) for k in ("prompt_tokens", "completion_tokens", "reasoning_tokens")}
            for choice in chunk["choices"]:
                found["chunks"] += 1
                found["content"] += choice["delta"].get("content") or ""
                found["reasoning"] += choice["delta"].get("reasoning_content") or ""
                for call in choice["delta"].get("tool_calls") or ():
                    add(call, calls)
                for each in (choice.get("logprobs") or {}).get("content") or ():
                    found["scores"].append((each["token"], round(each["logprob"], 3), len(each["top_logprobs"])))
                found["reason"] = choice.get("finish_reason") or found.get("reason")
                found["matched"] = choice.get("matched_stop") or found["matched"]
    return {**found, "calls": calls}


def close(ours: dict[str, Any], plain: dict[str, Any]) -> bool:
    """Equal, but for log-probabilities that differ by rounding."""
    near = [
        abs(a[1] - b[1]) <= 0.002 and (a[0], a[2]) == (b[0], b[2])
        for a, b in zip(ours["scores"], plain["scores"], strict=False)
    ]
    same = all(ours[key] == plain[key] for key in plain if key not in ("scores", "chunks"))
    return same and all(near) and len(ours["scores"]) == len(plain["scores"])


def asked(server: Server, ask: Callable[..., dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(partial(ask, server, kind), QUESTIONS))


QUICK = ("no thoughts", "schema", "two calls")
KINDS = [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in BODIES]


@pytest.mark.parametrize("kind", KINDS)
def test_a_chat_is_plain_decodings_whole_and_streamed(kind: str, server: Server, plain_hybrid: Server) -> None:
    for ask in (whole, streamed):
        ours, plain = (asked(each, ask, kind) for each in (server, plain_hybrid))
        for mine, theirs in zip(ours, plain, strict=True):
            assert close(mine, theirs), (ask.__name__, mine, theirs)
    assert sum(each["chunks"] for each in ours) <= sum(each["chunks"] for each in plain)
    if kind in CALLS:
        assert any(each["calls"] for each in ours), "no call was parsed"
