"""Streams of every endpoint are plain decoding's: the same events in the same order, with adjacent pieces joined."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.chats import DIRECT
from tests.support.servers import Server

pytestmark = pytest.mark.engine

# Calls: what precedes them, a call, what is between calls, what follows them, a parameter, what is between parameters.
FORMATS = json.loads((Path(__file__).parents[1] / "fixtures/parsers.json").read_text(encoding="utf-8"))
FUNCTIONS: dict[str, dict[str, str]] = FORMATS["functions"]
QUESTION = "Quinn has 10 cards. Quinn loses 5 of them. Quinn finds 22 cards. How many cards does Quinn have now?"
PROMPT = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
EMOJI = "漢字 🙂👍🏽 👩‍👩‍👧 ok\n"
PIECES = {"content", "reasoning_content", "arguments", "text", "thinking", "partial_json", "delta", "response"}
PER_CALL = {"id", "created", "created_at", "completed_at", "item_id", "call_id", "sequence_number", "total_duration"}


def calls(parser: str, *names: str) -> str:
    before, call, between, after, parameter, separator = (FORMATS["calls"][parser] + [""] * 4)[:6]
    texts = []
    for index, name in enumerate(names):
        arguments = FUNCTIONS[name]
        params = separator.join(parameter.replace("KEY", key).replace("VALUE", arguments[key]) for key in arguments)
        text = call.replace("NAME", name).replace("INDEX", str(index)).replace("PARAMS", params)
        texts.append(text.replace("JSON", json.dumps(arguments, ensure_ascii=False)))
    return before + between.join(texts) + after


TWO = {parser: calls(parser, "get_weather", "get_time") for parser in FORMATS["calls"]}
# The parser, the answer if it is not the model's own, and more keys of the request
Case = tuple[str, str, dict[str, Any]]
CALLS: dict[str, Case] = {
    **{f"calls of {parser}": (parser, text, {}) for parser, text in TWO.items()},
    "repeated calls": ("qwen3_coder", calls("qwen3_coder", *["get_time"] * 5), {}),
    "text after a call": ("qwen3_coder", calls("qwen3_coder", "get_time") + "\nDone.", {}),
    "text around calls": ("qwen25", f"I look: {TWO['qwen25']}\nThat is all.\n", {}),
    "thoughts, then calls": ("qwen3_coder", f"<think>\nI weigh Łódź, 漢字 🙂\n</think>\n\n{TWO['qwen3_coder']}", {}),
    "no call": ("qwen25", "", {}),
}
TEXTS: dict[str, Case] = {
    "ended by a stop string": ("none", "", {"stop": ["has 27", "22"]}),
    "characters of several tokens": ("none", EMOJI, {}),
    "two samples": ("none", "", {"n": 2}),
}
OLLAMA: dict[str, Case] = {
    f"{n} tokens": ("none", "", {"options": {"temperature": 0, "num_predict": n}}) for n in (5, 17, 200)
}
ONE = {"sampling_params": {"temperature": 0, "max_new_tokens": 60}}
CASES: dict[str, dict[str, Case]] = {
    "/v1/chat/completions": {
        **CALLS,
        **TEXTS,
        "json array": ("qwen25", "", {"tool_choice": "required"}),
        "log-probabilities": ("none", "", {"logprobs": True, "top_logprobs": 2}),
        "log-probabilities of calls": ("qwen25", TWO["qwen25"], {"logprobs": True}),
    },
    "/v1/messages": {**CALLS, "json array": ("qwen25", "", {"tool_choice": {"type": "any"}})},
    "/v1/responses": {**CALLS, "json array": ("qwen25", "", {"tool_choice": "required"})},
    "/v1/completions": {**TEXTS, "log-probabilities": ("none", "", {"logprobs": 2, "echo": True})},
    "/api/chat": OLLAMA,
    "/api/generate": OLLAMA,
}


def body(endpoint: str, model: str) -> dict[str, Any]:
    tools = [
        {"name": name, "parameters": {"type": "object", "properties": dict.fromkeys(keys, {"type": "string"})}}
        for name, keys in FUNCTIONS.items()
    ]
    chat = {"messages": [{"role": "user", "content": QUESTION}], "model": model, "temperature": 0, "max_tokens": 400}
    written = {"prompt": PROMPT, "model": model, "temperature": 0, "max_tokens": 60}
    wrapped = [{"type": "function", "function": tool} for tool in tools]
    usage = {"stream_options": {"include_usage": True}}
    return {
        "/v1/chat/completions": {**chat, **DIRECT, **usage, "tools": wrapped},
        "/v1/messages": {**chat, "tools": [{"name": t["name"], "input_schema": t["parameters"]} for t in tools]},
        "/v1/responses": {
            **{"input": QUESTION, "model": model, "temperature": 0, "max_output_tokens": 400},
            "tools": [{"type": "function", **tool} for tool in tools],
        },
        "/v1/completions": {**written, **usage},
        "/api/chat": chat,
        "/api/generate": written,
    }[endpoint]


def seen(response: httpx.Response) -> tuple[list[list[Any]], dict[str, list[Any]]]:
    """The events of a stream or the answer, adjacent ones that differ in a text joined; log-probabilities by key."""
    assert response.status_code == 200, response.text
    found: list[list[Any]] = []
    scores = defaultdict[str, list[Any]](list)

    def stable(value: Any, texts: list[str], key: str = "") -> Any:
        if isinstance(value, dict):
            for name, part in (value.get("logprobs") or {}).items():
                scores[name].append(part)
            return {k: stable(v, texts, k) for k, v in value.items() if k not in {"logprobs", *PER_CALL}}
        if isinstance(value, list):
            return [stable(each, texts) for each in value]
        if isinstance(value, str) and key in PIECES:
            texts.append(value)
            return ""
        return value

    lines = [line.removeprefix("data: ") for line in response.text.splitlines()]
    events = [json.loads(line) for line in lines if line.startswith("{")]
    for event in sorted(events, key=lambda event: [choice["index"] for choice in event.get("choices", ())]):
        texts: list[str] = []
        same = stable(event, texts)
        if found and len(texts) == 1 and found[-1][0] == same:
            found[-1][1] += texts[0]
        else:
            found.append([same, *texts])
    return found, scores


def numbers(value: Any) -> list[float]:
    """What rounding changes, in order."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [value] if isinstance(value, float) else [number for part in parts for number in numbers(part)]


def compare(ours: Server, plain: Server, endpoint: str, names: Iterable[str], ways: Sequence[bool] = (True,)) -> None:
    """Compare the cases' streams, and whole answers.

    On a busy machine plain decoding joins tokens that wait for its consumer, and then loses more, log-probabilities
    too; so it is asked again.
    """
    model = plain.get("/v1/models").json()["data"][0]["id"]

    def ask(name: str) -> None:
        parser, answer, more = CASES[endpoint][name]
        headers = {"x-tool-parser": parser, "x-regex": re.escape(answer).encode("unicode_escape").decode()}
        for stream in ways:
            json = {**body(endpoint, model), **more, "stream": stream}
            found = []
            for each in (ours, *[plain] * 3):
                events, scores = seen(httpx.post(each.url + endpoint, json=json, headers=headers, timeout=600))
                found.append((events, numbers(scores)))
                if len(found) > 1 and events == found[0][0] and len(found[-1][1]) == len(found[0][1]):
                    break
            (events, values), *_, (expected, theirs) = found
            assert events == expected, name
            assert values == pytest.approx(theirs, abs=0.002), name

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, names))


QUICK = {"repeated calls", "text around calls", "log-probabilities", "200 tokens"}


@pytest.mark.parametrize("endpoint", CASES)
def test_a_stream_is_plain_decodings(endpoint: str, server: Server, plain_hybrid: Server) -> None:
    compare(server, plain_hybrid, endpoint, sorted(QUICK & CASES[endpoint].keys()))


@pytest.mark.slow
@pytest.mark.parametrize("endpoint", CASES)
def test_streams_and_answers_of_all_kinds_are_plain_decodings(
    endpoint: str, server: Server, plain_hybrid: Server
) -> None:
    compare(server, plain_hybrid, endpoint, CASES[endpoint], (True, False))
