"""Requests in flight, and how many tokens they brought in which span of time.

A step brings several tokens at once, and an answer has few steps: tokens are counted as if each event's had come evenly
since the one before, so that a span need not begin and end with an answer.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import httpx

from sglang_dflash.diagnose.client import Client, Sampling
from sglang_dflash.errors import DFlashError
from sglang_dflash_lab.bench import tasks

OWN, WILD = "own", "wild"
# What a task of these measurements is in the benchmark: single questions of all the pairs' tasks in turn
_BENCH_TASK = {OWN: "questions"}
_COUNT = b'"completion_tokens":'


class Tokens:
    """How many tokens came when.

    Args:
        origin: the clock's time that :meth:`between` calls 0.
    """

    def __init__(self, origin: float = 0.0) -> None:
        self._origin = origin
        self._spans: list[tuple[float, float, int]] = []

    def add(self, since: float, until: float, count: int) -> None:
        """``count`` tokens, evenly from ``since`` to ``until``, in seconds of the clock."""
        self._spans.append((since - self._origin, until - self._origin, count))

    def between(self, start: float, end: float) -> float:
        """Tokens from second ``start`` to ``end`` after the origin; those of an instant count if it is not ``end``."""
        total = 0.0
        for since, until, count in self._spans:
            if since == until:
                total += count * (start <= since < end)
            else:
                total += count * max(0.0, min(until, end) - max(since, start)) / (until - since)
        return total


async def ask(client: Client, input_ids: list[int], most: int, tokens: Tokens) -> None:
    """Stream one greedy answer of at most ``most`` tokens, which may end by itself, and note what each event brings."""
    before, last = 0, 0.0
    async for arrived, payload in client.events(input_ids, Sampling(most)):
        count = completion_tokens(payload)
        tokens.add(last or arrived, arrived, count - before)
        before, last = count, arrived


def completion_tokens(payload: bytes) -> int:
    """The count in an event of the stream, found without parsing the event: the client shares the server's machine.

    Raises:
        DFlashError: the server gave the request up.
    """
    place = payload.rfind(_COUNT)
    if place < 0:
        raise DFlashError(
            payload.decode()[:300], expected="an event with completion_tokens", remedy="see the server's log"
        )
    digits = payload[place + len(_COUNT) :].lstrip()
    return int(digits[: next(i for i, byte in enumerate(digits) if not 48 <= byte < 58)])


async def prompts(client: Client, task: str, seed: int = 0, most: int = 256) -> list[list[int]]:
    """Token ids of a task's questions, shuffled.

    Args:
        task: ``own``, ``wild``, or a task of the benchmark.
    """
    questions = tasks.load(_BENCH_TASK.get(task, task), most)
    Random(seed).shuffle(questions)
    return [await client.tokenize(list(question.messages), thinking=False) for question in questions]


async def finish(client: Client, users: Sequence[asyncio.Task[None]]) -> None:
    """Abort what is in flight, wait for the users, who must ask nothing more, and empty the prefix cache."""
    async with httpx.AsyncClient(base_url=client.base_url, timeout=60, trust_env=False) as http:
        while pending := [user for user in users if not user.done()]:
            # A request that was on its way is missed the first time.
            (await http.post("/abort_request", json={"rid": "", "abort_all": True})).raise_for_status()
            await asyncio.wait(pending, timeout=1)
    for user in users:
        user.result()
    await client.flush_cache()


def now() -> float:
    return time.perf_counter()


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Finished runs; none if the file is not there yet."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
