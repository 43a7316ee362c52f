"""One measured run: a closed loop of `concurrency` users over a task's questions."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_dflash.bench.client import Client, Generation, Sampling
from sglang_dflash.bench.prompt_book import PromptBook, digest
from sglang_dflash.bench.provenance import now
from sglang_dflash.bench.records import RequestRecord, RunKey, RunRecord
from sglang_dflash.bench.tasks.question import Question

WORKER_KEY = "sglang_dflash"  # our worker's entry in the internal state of `/server_info`
WARM_UP_TOKENS = 32


@dataclass(frozen=True)
class Measured:
    run: RunRecord
    requests: list[RequestRecord]


async def measure(
    client: Client,
    key: RunKey,
    questions: list[Question],
    book: PromptBook,
    sampling: Sampling,
    session: int,
    on_answer: Callable[[], None] = lambda: None,
) -> Measured:
    """Warm up, empty the prefix cache, ask every question once, `key.concurrency` at a time.

    First turns are tokenised before the clock starts. The warm-up asks the same questions, shortly, at the same
    concurrency: kernels and graphs of that batch size are ready, and the flush afterwards takes its prefixes away.
    """
    for question in questions:
        await book.input_ids(client, key.task, question, [])
    brief = Sampling(min(WARM_UP_TOKENS, sampling.max_tokens), sampling.temperature, ignore_eos=True)
    warm_up = [await book.input_ids(client, key.task, question, []) for question in questions[: key.concurrency]]
    await asyncio.gather(*(client.generate(input_ids, brief) for input_ids in warm_up))
    await client.flush_cache()
    before = await _internal_state(client)
    started_at, load = now(), os.getloadavg()[0]
    loop = _ClosedLoop(client, key, book, sampling, on_answer)
    wall_s = await loop.run(questions)
    after = await _internal_state(client)
    run = RunRecord(
        key,
        wall_s,
        session,
        started_at,
        load,
        server_accept_length=after.get("avg_spec_accept_length"),
        worker=_counted(before.get(WORKER_KEY), after.get(WORKER_KEY)),
    )
    return Measured(run, loop.records())


async def _internal_state(client: Client) -> dict[str, Any]:
    state: dict[str, Any] = (await client.server_info())["internal_states"][0]
    return state


def _counted(before: dict[str, Any] | None, after: dict[str, Any] | None) -> dict[str, dict[str, float]] | None:
    """What our worker's counters (its entries that are dictionaries) grew by; None for another worker."""
    if before is None or after is None:
        return None
    return {
        name: {key: value - before.get(name, {}).get(key, 0) for key, value in counter.items()}
        for name, counter in after.items()
        if isinstance(counter, dict)
    }


@dataclass(frozen=True)
class _Answered:
    """A turn as it was measured; turned into a record after the run, when nobody waits for the client any more."""

    question: str
    turn: int
    input_ids: list[int]
    sent_s: float
    generation: Generation


class _ClosedLoop:
    """Users who send their next question as soon as the last is answered."""

    def __init__(
        self, client: Client, key: RunKey, book: PromptBook, sampling: Sampling, on_answer: Callable[[], None]
    ) -> None:
        self._client, self._key, self._book, self._sampling = client, key, book, sampling
        self._on_answer = on_answer
        self._start = 0.0
        self._answered: list[_Answered] = []

    async def run(self, questions: list[Question]) -> float:
        """-> seconds from the first request sent to the last token received."""
        waiting = iter(questions)
        self._start = time.perf_counter()

        async def user() -> None:
            for question in waiting:
                await self._converse(question)

        await asyncio.gather(*(user() for _ in range(self._key.concurrency)))
        return max(turn.sent_s + turn.generation.latency_s for turn in self._answered)

    def records(self) -> list[RequestRecord]:
        return [_record(self._key, turn) for turn in self._answered]

    async def _converse(self, question: Question) -> None:
        answers: list[str] = []
        for turn in range(1 + len(question.follow_ups)):
            input_ids = await self._book.input_ids(self._client, self._key.task, question, answers)
            sent_s = time.perf_counter() - self._start
            generation = await self._client.generate(input_ids, self._sampling)
            self._answered.append(_Answered(question.id, turn, input_ids, sent_s, generation))
            self._on_answer()
            if turn < len(question.follow_ups):
                answers.append(generation.text)


def _record(key: RunKey, turn: _Answered) -> RequestRecord:
    generation, meta = turn.generation, turn.generation.meta
    return RequestRecord(
        run=key,
        question=turn.question,
        turn=turn.turn,
        prompt_sha256=digest(turn.input_ids),
        prompt_tokens=meta["prompt_tokens"],
        cached_tokens=meta["cached_tokens"],
        completion_tokens=meta["completion_tokens"],
        start_s=turn.sent_s,
        ttft_s=generation.ttft_s,
        latency_s=generation.latency_s,
        finish_reason=meta["finish_reason"]["type"],
        verify_steps=meta.get("spec_verify_ct", 0),
        accepted_drafts=list(meta.get("spec_correct_drafts_histogram", ())),
        output_ids=generation.output_ids,
        text=generation.text,
    )
