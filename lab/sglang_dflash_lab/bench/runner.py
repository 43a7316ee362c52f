"""One measured run: a closed loop of ``concurrency`` users over a task's questions, the same prompts for every arm."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_dflash.diagnose.answers import RequestRecord, RunKey, closed_loop, record
from sglang_dflash.diagnose.client import WORKER_KEY, Client, Generation, Message, Sampling
from sglang_dflash_lab.bench.provenance import now
from sglang_dflash_lab.bench.results import RunRecord, append_lines
from sglang_dflash_lab.bench.tasks.question import Question

WARM_UP_TOKENS = 32
PROMPTS = "prompts.jsonl"


class PromptBook:
    """Token ids by (task, question, turn), kept in a file beside the results so that a resumed session uses the same.

    A later turn contains the answers before it. The first arm that gets there settles them for all arms: otherwise two
    arms whose answers part at a near-tie would be asked different questions from then on.
    """

    def __init__(self, folder: Path, thinking: bool | None) -> None:
        self._thinking = thinking
        self._path = folder / PROMPTS
        self._ids: dict[tuple[str, str, int], list[int]] = {}
        if self._path.exists():
            for line in self._path.read_text().splitlines():
                row = json.loads(line)
                self._ids[row["task"], row["question"], row["turn"]] = row["input_ids"]

    async def input_ids(self, client: Client, task: str, question: Question, answers: list[str]) -> list[int]:
        """The prompt of the turn after ``answers``, rendered by the server's chat template the first time."""
        key = task, question.id, len(answers)
        if key not in self._ids:
            self._ids[key] = await client.tokenize(conversation(question, answers), self._thinking)
            row = {"task": task, "question": question.id, "turn": len(answers), "input_ids": self._ids[key]}
            append_lines(self._path, [row])
        return self._ids[key]


def conversation(question: Question, answers: list[str]) -> list[Message]:
    """The opening messages, then each answer with the follow-up that comes after it."""
    messages = list(question.messages)
    for answer, follow_up in zip(answers, question.follow_ups, strict=False):
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": follow_up}]
    return messages


async def measure(
    client: Client,
    key: RunKey,
    questions: list[Question],
    book: PromptBook,
    sampling: Sampling,
    session: int,
    on_answer: Callable[[], None] = lambda: None,
) -> tuple[RunRecord, list[RequestRecord]]:
    """Warm up, empty the prefix cache, ask every question once, ``key.concurrency`` at a time.

    First turns are tokenised before the clock starts. The warm-up asks the same questions, shortly, at the same
    concurrency: kernels and graphs of that batch size are ready, and the flush afterwards takes its prefixes away.
    """
    prompts = [await book.input_ids(client, key.task, question, []) for question in questions]
    brief = Sampling(min(WARM_UP_TOKENS, sampling.max_tokens), sampling.temperature, ignore_eos=True)
    await asyncio.gather(*(client.generate(input_ids, brief) for input_ids in prompts[: key.concurrency]))
    await client.flush_cache()
    before = await internal_state(client)
    started_at, load, start = now(), os.getloadavg()[0], time.perf_counter()
    turns: list[tuple[str, int, list[int], float, Generation]] = []

    async def converse(question: Question) -> None:
        answers: list[str] = []
        for turn in range(1 + len(question.follow_ups)):
            input_ids = await book.input_ids(client, key.task, question, answers)
            sent_s = time.perf_counter() - start
            generation = await client.generate(input_ids, sampling)
            turns.append((question.id, turn, input_ids, sent_s, generation))
            on_answer()
            if turn < len(question.follow_ups):
                answers.append(generation.event["text"])

    await closed_loop(questions, key.concurrency, converse)
    # Answers are parsed only now: while requests are in flight, that would take the time which is being measured.
    requests = [record(key, *turn) for turn in turns]
    after = await internal_state(client)
    run = RunRecord(
        key,
        wall_s=max(request.start_s + request.latency_s for request in requests),
        session=session,
        started_at=started_at,
        load_average=load,
        server_accept_length=after.get("avg_spec_accept_length"),
        worker=_counted(before.get(WORKER_KEY), after.get(WORKER_KEY)),
    )
    return run, requests


async def internal_state(client: Client) -> dict[str, Any]:
    """The scheduler's part of ``/server_info``; our worker's part of it is under ``WORKER_KEY``."""
    state: dict[str, Any] = (await client.server_info())["internal_states"][0]
    return state


def _counted(before: dict[str, Any] | None, after: dict[str, Any] | None) -> dict[str, dict[str, float]] | None:
    """Growth of our worker's counters (its entries that are dictionaries of numbers); None for another worker."""
    if before is None or after is None:
        return None
    return {
        name: {key: value - before.get(name, {}).get(key, 0) for key, value in counter.items()}
        for name, counter in after.items()
        if isinstance(counter, dict) and all(isinstance(value, int | float) for value in counter.values())
    }
