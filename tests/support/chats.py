"""What a client sees of a chat, whole or streamed."""

from __future__ import annotations

import json
from typing import Any

import httpx

DIRECT = {"chat_template_kwargs": {"enable_thinking": False}}  # a grammar applies after the thoughts


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream that was read to its end."""
    return [json.loads(line[6:]) for line in response.text.split("\n") if line.startswith("data: {")]


def seen(response: httpx.Response) -> dict[str, Any]:
    """The answer's text, thoughts, calls, end and counts."""
    is_whole = response.headers["content-type"].startswith("application/json")
    found: dict[str, Any] = {"content": "", "reasoning_content": "", "errors": []}
    calls: dict[int, list[str]] = {}
    last: dict[str, Any] = dict.fromkeys(("finish_reason", "matched_stop", "usage"))
    for body in [response.json()] if is_whole else events(response):
        last["usage"] = body.get("usage") or last["usage"]
        found["errors"] += [body["error"]] if "error" in body else []
        for choice in body.get("choices", ()):
            part = choice["message" if is_whole else "delta"]
            for text in ("content", "reasoning_content"):
                found[text] += part.get(text) or ""
            for i, call in enumerate(part.get("tool_calls") or ()):
                name_and_arguments = calls.setdefault(i if is_whole else call["index"], ["", ""])
                for each, key in enumerate(("name", "arguments")):
                    name_and_arguments[each] += call["function"].get(key) or ""
            for end in ("finish_reason", "matched_stop"):
                last[end] = choice.get(end) or last[end]
    return {**found, **last, "calls": calls}
