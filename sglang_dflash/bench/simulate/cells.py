"""The recorded cells of a benchmark: task x concurrency, each with its answers and how long they took."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from sglang_dflash.bench import results, step_log
from sglang_dflash.bench.modes import RANDOM
from sglang_dflash.bench.simulate.recording import Answer, answers
from sglang_dflash.bench.step_log import Decode, Step
from sglang_dflash.bench.summary import Summary
from sglang_dflash.errors import DFlashError


@dataclass(frozen=True)
class Cell:
    """One load.

    Attributes:
        runs: by repeat, its answers in the order in which they were asked for.
        seconds: of all runs together; None if it is not known.
        in_vain: steps launched for an answer behind its end, on average.
    """

    task: str
    concurrency: int
    runs: list[list[Answer]]
    seconds: float | None
    in_vain: float


class Measured(NamedTuple):
    """What another arm came to in a cell: output tok/s, and micro accept length, NaN where it is not known."""

    tokens_per_s: float
    accept_length: float = math.nan


@dataclass(frozen=True)
class Recording:
    """Steps of random widths, and the cells in which they were made.

    Attributes:
        source: where they are from.
        measured: by (arm, task, concurrency), what was measured in the same benchmark.
    """

    source: str
    steps: list[Step]
    cells: list[Cell]
    measured: dict[tuple[str, str, int], Measured]


def of_log(path: Path, users: int | None = None, measured: Path | None = None) -> Recording:
    """A log by itself: one cell, every logged token part of an answer, no time between an answer and the next question.

    Args:
        users: requests in flight; None for as many as the largest batch.
        measured: JSON object of output tok/s by arm.
    """
    steps = step_log.read(path)
    found = [answer for answer in answers(steps).values() if answer.distance]
    if not found:
        raise DFlashError(
            f"no request in {path}", expected="prefills and their decode steps", remedy="record for longer"
        )
    users = users or max(len(step.rids) for step in steps if isinstance(step, Decode))
    speeds = json.loads(measured.read_text()) if measured else {}
    cell = Cell("all", users, [found], None, 0.0)
    beside = {(arm, cell.task, users): Measured(speed) for arm, speed in speeds.items()}
    return Recording(str(path), steps, [cell], beside)


def of_benchmark(out: Path) -> Recording:
    """The cells of a results folder's ``random:BLOCK`` arm, and what its other arms measured there.

    Raises:
        DFlashError: no such arm, or no log of it.
    """
    summary = Summary(results.read_finished(out))
    label = next((mode for mode in summary.modes if mode.partition(":")[0] == RANDOM), None)
    logs = step_log.logs(out, label) if label else []
    if label is None or not logs:
        raise DFlashError(
            f"{len(logs)} step logs of arm {label} in {out}, which has {', '.join(summary.modes)}",
            expected="an arm random:BLOCK on servers that the benchmark started",
            remedy="measure it with `sglang-dflash bench --modes ar,dflash:8,dflash:16,random:16 …`",
        )
    by_log = [step_log.read(path) for path in logs]
    logged = {rid: answer for steps in by_log for rid, answer in answers(steps).items()}
    keys = sorted({(run.run.task, run.run.concurrency) for run in summary.runs(label)})
    cells = [_cell(summary, label, task, concurrency, logged) for task, concurrency in keys]
    measured = {
        (row.mode, row.task, row.concurrency): Measured(row.throughput, row.accept_micro) for row in summary.rows
    }
    return Recording(f"{label} of {out}", [step for steps in by_log for step in steps], cells, measured)


def _cell(summary: Summary, label: str, task: str, concurrency: int, logged: dict[str, Answer]) -> Cell:
    runs, in_vain = [], []
    for run in summary.runs(label, task, concurrency):
        asked = sorted(
            (r for r in summary.requests(label, task, concurrency) if r.run == run.run), key=lambda r: r.start_s
        )
        found = []
        for request in asked:
            # The prefill brings the first token; an answer of one token takes no step.
            if request.completion_tokens > 1:
                answer = _logged(logged, request.rid)
                in_vain.append(answer.cut(request.completion_tokens - 1))
                found.append(answer)
        runs.append(found)
    seconds = sum(run.wall_s for run in summary.runs(label, task, concurrency))
    return Cell(task, concurrency, runs, seconds, fmean(in_vain))


def _logged(logged: dict[str, Answer], rid: str) -> Answer:
    if rid not in logged:
        raise DFlashError(
            f"no step of request {rid} in the log", expected="every measured request in it", remedy="record again"
        )
    return logged[rid]


def answers_by_task(cells: Sequence[Cell]) -> dict[str, list[Answer]]:
    """All answers of a task, whatever the concurrency: acceptance depends on the text, not on the load."""
    found: dict[str, list[Answer]] = {}
    for cell in cells:
        found.setdefault(cell.task, []).extend(answer for run in cell.runs for answer in run)
    return found
