"""One request, and what came back of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass
from random import Random
from typing import Any

import httpx

from tests.soak.catalogue import Entry

WHOLE, STREAMED, ABORTED, VANISHED = "whole", "streamed", "aborted", "vanished"
FATES = {WHOLE: 0.4, STREAMED: 0.4, ABORTED: 0.1, VANISHED: 0.1}


@dataclass
class Outcome:
    """What a client saw of its request.

    Attributes:
        entry: its number in the catalogue.
        answer: token ids, or text and tool calls of a chat; of a stream that broke off, as much as came.
        complete: whether the server ended the answer by itself.
        error: what the client did not expect, None otherwise.
    """

    entry: int
    fate: str
    answer: Any
    complete: bool
    error: str | None = None

    @property
    def tokens(self) -> int:
        return len(self.answer) if isinstance(self.answer, list) else 0


async def ask(http: httpx.AsyncClient, entry: Entry, number: int, fate: str, random: Random) -> Outcome:
    """Send ``entry`` and let its fate happen to it."""
    if entry.route != "/generate" or fate == WHOLE:
        return await _whole(http, entry, number)
    rid = f"soak-{random.getrandbits(64):x}"
    if fate == STREAMED:
        return await _stream(http, entry, number, fate, rid)
    delay = random.random() ** 2
    if fate == VANISHED:
        found = Outcome(number, fate, [], False)
        with contextlib.suppress(TimeoutError):
            found = await asyncio.wait_for(_stream(http, entry, number, fate, rid), delay)
        return found
    asked = asyncio.create_task(_stream(http, entry, number, fate, rid))
    await asyncio.sleep(delay)
    (await http.post("/abort_request", json={"rid": rid})).raise_for_status()
    return await asked


async def _whole(http: httpx.AsyncClient, entry: Entry, number: int) -> Outcome:
    response = await http.post(entry.route, json=entry.body)
    if response.status_code != 200:
        return Outcome(number, WHOLE, None, False, f"{response.status_code}: {response.text[:300]}")
    return Outcome(number, WHOLE, answer_of(response.json()), True)


def answer_of(body: dict[str, Any]) -> Any:
    if "output_ids" in body:
        return body["output_ids"]
    message = body["choices"][0]["message"]
    calls = [call["function"] for call in message.get("tool_calls") or []]
    return {"content": message["content"], "calls": calls}


async def _stream(http: httpx.AsyncClient, entry: Entry, number: int, fate: str, rid: str) -> Outcome:
    found = Outcome(number, fate, [], False)
    body = {**entry.body, "stream": True, "rid": rid}
    async with http.stream("POST", entry.route, json=body) as response:
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event or "meta_info" not in event:
                found.error = None if fate == ABORTED else line[:300]
                return found
            reason = event["meta_info"]["finish_reason"]
            if reason is not None and reason["type"] == "abort":
                # Its tokens are no part of the answer: SGLang does not cut a block at the answer's end then, and gives
                # a request whose grammar is still compiled the token after an empty prompt.
                break
            found.answer, found.complete = event["output_ids"], reason is not None
    if not found.complete and fate == STREAMED:
        found.error = f"the stream ended with status {response.status_code} before its answer did"
    return found
