"""What a benchmark writes: one ``RequestRecord`` per answered turn, one ``RunRecord`` per measured run.

All times are seconds of the client's monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Self


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


@dataclass(frozen=True)
class RunRecord(Record):
    """One measured run; its line is written after those of its requests, so it also says that they are complete.

    Attributes:
        wall_s: from the first request sent to the last token received.
        session: index of the provenance line this run was measured under.
        started_at: ISO time with zone.
        load_average: 1-minute load of the client's machine just before the run.
        server_accept_length: ``avg_spec_accept_length`` of ``/server_info`` after the run: the server's lifetime,
            warm-up included, so it is near but not equal to the run's own figure.
        worker: by how much the counters of our worker in ``/server_info`` grew during the run: ``steps_by_width``,
            ``blocks_by_accept_length`` and, if the server measures them, ``stage_seconds``. None for another worker.
    """

    wall_s: float
    session: int
    started_at: str
    load_average: float
    server_accept_length: float | None = None
    worker: dict[str, dict[str, float]] | None = None
