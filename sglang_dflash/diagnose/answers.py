"""Answers as the client saw them, and the accept lengths of many."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from statistics import fmean
from typing import Any, Self, TypeVar

from sglang_dflash.diagnose.client import Generation

Item = TypeVar("Item")
NAN = float("nan")


@dataclass(frozen=True)
class RunKey:
    """One cell of the table, measured once: the unit of alternation, resumption and bootstrap.

    Attributes:
        mode: the arm's label, as given in ``--modes`` (``ar``, ``dflash:16``, ``builtin:16``, …).
        task: name of the task.
        concurrency: requests in flight.
        repeat: 0-based repetition; runs with the same ``repeat`` are neighbours in time.
    """

    mode: str
    task: str
    concurrency: int
    repeat: int


@dataclass(frozen=True)
class Record:
    """A line of the results file that belongs to a run."""

    run: RunKey

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Self:
        """The record, without the row's ``kind`` and without what a newer version may have added."""
        known = {f.name: row[f.name] for f in fields(cls) if f.name in row}
        return cls(**{**known, "run": RunKey(**row["run"])})


@dataclass(frozen=True)
class RequestRecord(Record):
    """One generation turn as the client saw it.

    Attributes:
        question, turn: which prompt; ``turn`` counts from 0 in a multi-turn question.
        prompt_sha256: digest of the prompt's token ids, equal in all arms.
        prompt_tokens, cached_tokens, completion_tokens: counts from the server's ``meta_info``.
        start_s: when the request was sent, since the start of the run.
        ttft_s: from sending to the first token.
        latency_s: from sending to the last token.
        finish_reason: ``stop`` or ``length``.
        verify_steps: target verify forwards of this request (``spec_verify_ct``); 0 without speculation.
        accepted_drafts: ``[k]`` is the number of steps that accepted ``k`` drafted tokens, the bonus token not counted.
        output_ids: the generated token ids.
        text: the generated text.
        correct: whether the answer is right; None if the task has no checkable answer.
        rid: the server's id of the request, by which its steps are found in the server's step log.
        width: mean positions of its blocks (``spec_cap_length``); None where all are as wide.
    """

    question: str
    turn: int
    prompt_sha256: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    start_s: float
    ttft_s: float
    latency_s: float
    finish_reason: str
    verify_steps: int = 0
    accepted_drafts: list[int] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    text: str = ""
    correct: bool | None = None
    rid: str = ""
    width: float | None = None


def digest(input_ids: list[int]) -> str:
    return hashlib.sha256(json.dumps(input_ids).encode()).hexdigest()[:16]


async def closed_loop(items: Iterable[Item], users: int, ask: Callable[[Item], Awaitable[None]]) -> None:
    """``users`` who each ask for the next item as soon as their last one is answered."""
    waiting = iter(items)

    async def user() -> None:
        for item in waiting:
            await ask(item)

    await asyncio.gather(*(user() for _ in range(users)))


def record(
    key: RunKey, question: str, turn: int, input_ids: list[int], sent_s: float, generation: Generation
) -> RequestRecord:
    """The results' line of an answered turn.

    Args:
        sent_s: when it was sent, seconds on the run's clock.
    """
    meta = generation.event["meta_info"]
    return RequestRecord(
        run=key,
        question=question,
        turn=turn,
        prompt_sha256=digest(input_ids),
        prompt_tokens=meta["prompt_tokens"],
        cached_tokens=meta["cached_tokens"],
        completion_tokens=meta["completion_tokens"],
        start_s=sent_s,
        ttft_s=generation.ttft_s,
        latency_s=generation.latency_s,
        finish_reason=meta["finish_reason"]["type"],
        verify_steps=meta.get("spec_verify_ct", 0),
        accepted_drafts=list(meta.get("spec_correct_drafts_histogram", ())),
        output_ids=generation.event["output_ids"],
        text=generation.event["text"],
        rid=meta["id"],
        width=meta.get("spec_cap_length"),
    )


def accept_length_macro(requests: Sequence[RequestRecord]) -> float:
    """completion_tokens / spec_verify_ct per generation turn, averaged over turns."""
    lengths = [r.completion_tokens / r.verify_steps for r in requests if r.verify_steps]
    return fmean(lengths) if lengths else NAN


def accepted_histogram(requests: Sequence[RequestRecord]) -> list[int]:
    """``[k]``: steps that accepted ``k`` drafted tokens, the bonus token not counted."""
    columns = zip_longest(*(r.accepted_drafts for r in requests), fillvalue=0)
    return [sum(column) for column in columns]
