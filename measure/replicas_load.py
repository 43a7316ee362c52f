"""Requests for replicas: always so many in flight, or as a Poisson stream."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from statistics import mean, stdev
from typing import Self

import httpx

from measure.width_load import now
from sglang_dflash.bench.client import Sampling
from sglang_dflash.errors import DFlashError

BATCHES = 5


@dataclass(frozen=True)
class Estimate:
    """A mean and its standard error."""

    value: float
    error: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """By means of consecutive batches: neighbours are alike, for they met in the replica."""
        cuts = [len(values) * i // BATCHES for i in range(BATCHES + 1)]
        batches = [mean(values[start:end]) for start, end in pairwise(cuts) if end > start]
        return cls(mean(values), stdev(batches) / len(batches) ** 0.5 if len(batches) > 1 else 0.0)


class Asker:
    """Asks one URL for whole answers; use as an async context manager.

    Args:
        asked: token ids of the prompts, which are asked in random order, all of them before one comes again.
    """

    def __init__(self, url: str, asked: Sequence[list[int]], most: int, rng: Random) -> None:
        self._sampling = Sampling(most).parameters()
        self._asked = _rounds(asked, rng)
        self._http = httpx.AsyncClient(
            base_url=url, timeout=600, limits=httpx.Limits(max_connections=None), trust_env=False
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def ask(self) -> tuple[float, float]:
        """When the request was sent and when its answer was there.

        Raises:
            DFlashError: there was none.
        """
        body = {"input_ids": next(self._asked), "sampling_params": self._sampling}
        sent = now()
        response = await self._http.post("/generate", json=body)
        if response.is_error:
            raise DFlashError(
                f"{response.url} answered {response.status_code}: {response.text[:300]}",
                expected="an answer",
                remedy="see the logs of the router and the replicas",
            )
        return sent, now()

    async def in_flight(self, users: int, answers: int) -> Estimate:
        """Requests per second with ``users`` always in flight, over ``answers``; some before them do not count."""
        warm_up, done = 2 * users, list[float]()

        async def user() -> None:
            while len(done) < warm_up + answers:
                sent, arrived = await self.ask()
                done.append(arrived - sent)

        await asyncio.gather(*(user() for _ in range(users)))
        seconds = Estimate.of(done[warm_up : warm_up + answers])
        # Little's law in a closed loop: no fraction of an answer is lost at the ends.
        return Estimate(users / seconds.value, users / seconds.value * seconds.error / seconds.value)

    async def poisson(self, arrivals: float, seconds: float, rng: Random) -> list[tuple[float, float]]:
        """Start and end of every request of a Poisson stream, in seconds since it began."""
        began, due, tasks = now(), rng.expovariate(arrivals), []
        while due < seconds:
            await asyncio.sleep(began + due - now())
            tasks.append(asyncio.create_task(self.ask()))
            due += rng.expovariate(arrivals)
        return [(sent - began, arrived - began) for sent, arrived in await asyncio.gather(*tasks)]


def _rounds(asked: Sequence[list[int]], rng: Random) -> Iterator[list[int]]:
    while True:
        yield from rng.sample(asked, len(asked))


def mean_in_flight(requests: Iterable[tuple[float, float]], start: float, end: float) -> float:
    """Mean number of requests in flight from ``start`` to ``end``."""
    return sum(max(0.0, min(arrived, end) - max(sent, start)) for sent, arrived in requests) / (end - start)
