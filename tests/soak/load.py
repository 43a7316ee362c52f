"""The load: bursts of drawn requests, and beside them what watches the server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

import httpx

from tests.soak.catalogue import SEEDED, Entry
from tests.soak.client import FATES, Outcome, ask
from tests.support.servers import Server

BURST = 60  # requests
AT_ONCE = (1, 4, 8, 16, 32)  # up to four times as many as the server runs
SPEED_ROUNDS = 12
SPEED_REQUESTS, SPEED_AT_ONCE = 24, 8
SAMPLE_SECONDS = 1.0


@dataclass(frozen=True)
class Sample:
    """The server at one moment: requests done so far, MiB of all its processes, share of K/V in use, ``/health``."""

    done: int
    rss: float
    kv_usage: float
    health: int


@dataclass
class Load:
    """What happened.

    Attributes:
        speeds: tokens per second of the same requests, spread evenly over the run.
        updates: answers of ``/update_weights_from_disk``, asked under load.
        seconds: of the whole load.
    """

    outcomes: list[Outcome]
    samples: list[Sample]
    speeds: list[float]
    updates: list[bool]
    seconds: float = 0.0

    def rows(self) -> dict[str, list[Any]]:
        return {"samples": [asdict(sample) for sample in self.samples]}


async def drive(server: Server, entries: Sequence[Entry], requests: int, weights: str, seed: int) -> Load:
    """Draw and send ``requests`` of the catalogue; ``weights`` is the folder that the target is loaded from again."""
    load, random, start = Load([], [], [], []), Random(seed), time.monotonic()
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
    """Tokens per second of the catalogue's first greedy prompts, from an empty prefix cache, all answers as long."""
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
    """Empty the prefix cache, once the server has noticed that nobody asks for anything."""
    (await http.post("/flush_cache", params={"timeout": 60})).raise_for_status()


async def _update_weights(http: httpx.AsyncClient, weights: str) -> bool:
    answer = await http.post("/update_weights_from_disk", json={"model_path": weights})
    return answer.status_code == 200 and bool(answer.json()["success"])


async def _watch(server: Server, http: httpx.AsyncClient, load: Load) -> None:
    processes = server.family()
    while True:
        health = (await http.get("/health")).status_code
        usage = [
            line for line in (await http.get("/metrics")).text.splitlines() if line.startswith("sglang:token_usage{")
        ]
        rss = sum(process.memory_info().rss for process in processes if process.is_running()) / 2**20
        load.samples.append(Sample(len(load.outcomes), rss, float(usage[0].split()[-1]) if usage else 0.0, health))
        await asyncio.sleep(SAMPLE_SECONDS)
