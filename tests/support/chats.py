"""What a client sees of an answer, from its whole body or joined from a stream."""

from __future__ import annotations

import json
from typing import Any

import httpx


def answer_of(response: httpx.Response) -> Any:
    """Token ids; of a chat its text, thoughts, calls, end, counts and log-probabilities."""
    if response.headers["content-type"].startswith("application/json"):
        bodies = [response.json()]
        if "output_ids" in bodies[0]:
            return bodies[0]["output_ids"]
    else:
        bodies = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    found: dict[str, Any] = {"content": "", "reasoning_content": "", "reason": None, "matched": None}
    found |= {"errors": [], "scores": []}
    calls: dict[int, list[str]] = {}
    for body in bodies:
        found["usage"] = body.get("usage")
        found["errors"] += [body["error"]] if "error" in body else []
        for choice in body.get("choices", ()):
            part = choice.get("message") or choice["delta"]
            found["content"] += part.get("content") or ""
            found["reasoning_content"] += part.get("reasoning_content") or ""
            found["reason"] = choice["finish_reason"] or found["reason"]
            found["matched"] = choice.get("matched_stop") or found["matched"]
            for each in (choice.get("logprobs") or {}).get("content") or ():
                found["scores"].append((each["token"], round(each["logprob"], 3), len(each["top_logprobs"])))
            for i, call in enumerate(part.get("tool_calls") or ()):
                whole = calls.setdefault(call["index"] if "delta" in choice else i, ["", ""])
                whole[0] += call["function"].get("name") or ""
                whole[1] += call["function"].get("arguments") or ""
    return {**found, "calls": [calls[i] for i in sorted(calls)]}
