"""The load: bursts of drawn requests, each with a fate, while samples of the server are taken."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import httpx

from tests.soak.catalogue import SEEDED, Entry
from tests.support.chats import seen
from tests.support.servers import Server

WHOLE, STREAMED, ABORTED, VANISHED = "whole", "streamed", "aborted", "vanished"
FATES = {WHOLE: 0.4, STREAMED: 0.4, ABORTED: 0.1, VANISHED: 0.1}
BURST = 60  # requests
AT_ONCE = (1, 4, 8, 16, 32)  # up to four times as many as the server runs
SPEED_ROUNDS = 12
SPEED_REQUESTS, SPEED_AT_ONCE = 24, 8
SAMPLE_SECONDS = 1.0


@dataclass
class Outcome:
    """The result of a request.

    Attributes:
        entry: its number in the catalogue.
        answer: as ``answer_of`` returns it; of an interrupted stream, what arrived.
        complete: whether the server ended the answer.
        error: what the client did not expect.
    """

    entry: int
    fate: str
    answer: Any
    complete: bool
    error: str | None = None


async def ask(http: httpx.AsyncClient, entry: Entry, number: int, fate: str, random: Random) -> Outcome:
    """Send ``entry``, and abort it or drop its connection if that is its fate."""
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
    return Outcome(number, WHOLE, answer_of(entry, response), True)


def answer_of(entry: Entry, response: httpx.Response) -> Any:
    """Token ids; of a chat what its client sees."""
    return response.json()["output_ids"] if entry.route == "/generate" else seen(response)


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
                # Its tokens do not count: SGLang does not cut the block at the answer's end then, and returns the token
                # after an empty prompt for a request whose grammar is still being compiled.
                break
            found.answer, found.complete = event["output_ids"], reason is not None
    if not found.complete and fate == STREAMED:
        found.error = f"the stream ended with status {response.status_code} before its answer did"
    return found


@dataclass(frozen=True)
class Sample:
    """The server at one moment: MiB of all its processes, share of K/V in use, ``/health``."""

    rss: float
    kv_usage: float
    health: int


@dataclass
class Load:
    """Results of the whole load.

    Attributes:
        speeds: tokens per second of the same requests, spread evenly over the run.
        updates: whether each ``/update_weights_from_disk`` under load succeeded.
        seconds: of the whole load.
    """

    outcomes: list[Outcome]
    samples: list[Sample]
    speeds: list[float]
    updates: list[bool]
    seconds: float = 0.0


async def drive(server: Server, entries: Sequence[Entry], requests: int, weights: str) -> Load:
    """Draw and send ``requests`` of the catalogue, and reload the target from the folder ``weights`` now and then."""
    load, random, start = Load([], [], [], []), Random(0), time.monotonic()
    bursts = -(-requests // BURST)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits, trust_env=False) as http:
        watch = asyncio.create_task(_watch(server, http, load))
        for burst in range(bursts):
            if burst * SPEED_ROUNDS // bursts != (burst - 1) * SPEED_ROUNDS // bursts:
                load.speeds.append(await _speed(http, entries))
            size = min(BURST, requests - len(load.outcomes))
            burst_done = asyncio.create_task(_burst(http, entries, size, random, load))
            if burst % 8 == 1:
                load.updates.append(await _update_weights(http, weights))
            await burst_done
            if burst % 4 == 3:
                await flush(http)
        load.speeds.append(await _speed(http, entries))
        watch.cancel()
    load.seconds = time.monotonic() - start
    return load


async def _burst(http: httpx.AsyncClient, entries: Sequence[Entry], size: int, random: Random, load: Load) -> None:
    slots = asyncio.Semaphore(random.choice(AT_ONCE))

    async def one(number: int, fate: str, own: Random) -> None:
        async with slots:
            load.outcomes.append(await ask(http, entries[number], number, fate, own))

    fates = random.choices(list(FATES), list(FATES.values()), k=size)
    await asyncio.gather(*(one(random.randrange(len(entries)), fate, Random(random.random())) for fate in fates))


async def _speed(http: httpx.AsyncClient, entries: Sequence[Entry]) -> float:
    """Return tokens per second of the catalogue's first greedy prompts, from an empty prefix cache, at one length."""
    await flush(http)
    asked = [entry for entry in entries if entry.route == "/generate" and entry.kind != SEEDED][:SPEED_REQUESTS]
    slots = asyncio.Semaphore(SPEED_AT_ONCE)
    params = {"temperature": 0, "max_new_tokens": 64, "ignore_eos": True}

    async def one(entry: Entry) -> int:
        async with slots:
            body = {"input_ids": entry.body["input_ids"], "sampling_params": params}
            return len((await http.post("/generate", json=body)).json()["output_ids"])

    start = time.monotonic()
    tokens = sum(await asyncio.gather(*map(one, asked)))
    return tokens / (time.monotonic() - start)


async def flush(http: httpx.AsyncClient) -> None:
    """Empty the prefix cache once the server is idle."""
    (await http.post("/flush_cache", params={"timeout": 60})).raise_for_status()


async def _update_weights(http: httpx.AsyncClient, weights: str) -> bool:
    answer = await http.post("/update_weights_from_disk", json={"model_path": weights})
    return answer.status_code == 200 and bool(answer.json()["success"])


async def _watch(server: Server, http: httpx.AsyncClient, load: Load) -> None:
    processes = server.family()
    while True:
        health = (await http.get("/health")).status_code
        usage = re.search(r"^sglang:token_usage\{.* (\S+)$", (await http.get("/metrics")).text, re.MULTILINE)
        rss = sum(process.memory_info().rss for process in processes if process.is_running()) / 2**20
        load.samples.append(Sample(rss, float(usage[1]) if usage else 0.0, health))
        await asyncio.sleep(SAMPLE_SECONDS)
