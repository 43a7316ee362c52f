"""From records to one row per (arm, task, concurrency): the figures of every table and plot and of the CSV file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sglang_dflash_lab.bench import metrics
from sglang_dflash_lab.bench.modes import AR
from sglang_dflash_lab.bench.results import RequestRecord, Results, RunKey, RunRecord, write_csv


@dataclass(frozen=True)
class Row:
    """One cell of the cards' tables with everything that was measured in it.

    Attributes:
        throughput: output tokens/s end to end, median over repeats; ``spread``: (max - min) / median.
        speed_up, speed_up_low, speed_up_high: against the ``ar`` arm of the same cell, NaN without one.
        decode: tokens/s of one user after the first token, median over repeats.
        ttft_*, tpot_*: seconds, over all requests of all repeats.
        accept_macro, accept_micro, committed, width, step_s, host_s: see ``metrics``.
        accuracy: share of right answers, NaN if none can be checked.
        equal, compared: answers equal to the ``ar`` arm's token for token, and how many were compared.
        load: highest 1-minute load average at the start of a run.
    """

    mode: str
    task: str
    concurrency: int
    repeats: int
    requests: int
    throughput: float
    spread: float
    speed_up: float
    speed_up_low: float
    speed_up_high: float
    decode: float
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p95: float
    tpot_p99: float
    accept_macro: float
    accept_micro: float
    committed: float
    width: float
    step_s: float
    host_s: float
    accuracy: float
    equal: int
    compared: int
    load: float


class Summary:
    """The rows of a results file, in the order in which arms, tasks and concurrencies were first measured."""

    def __init__(self, results: Results) -> None:
        self.results = results
        self._requests: defaultdict[RunKey, list[RequestRecord]] = defaultdict(list)
        for request in results.requests:
            self._requests[request.run].append(request)
        self.modes = _unique([run.run.mode for run in results.runs], first=AR)
        self.tasks = _unique([run.run.task for run in results.runs])
        self.concurrencies = sorted({run.run.concurrency for run in results.runs})
        cells = [(m, t, c) for t in self.tasks for c in self.concurrencies for m in self.modes]
        self.rows = [self._row(*cell) for cell in cells if self.runs(*cell)]

    def row(self, mode: str, task: str, concurrency: int) -> Row | None:
        return next((r for r in self.rows if (r.mode, r.task, r.concurrency) == (mode, task, concurrency)), None)

    def runs(self, mode: str, task: str | None = None, concurrency: int | None = None) -> list[RunRecord]:
        """Runs of an arm, in one cell or in all, in the order in which they were made."""
        return [
            run
            for run in self.results.runs
            if run.run.mode == mode and task in (None, run.run.task) and concurrency in (None, run.run.concurrency)
        ]

    def requests(self, mode: str, task: str | None = None, concurrency: int | None = None) -> list[RequestRecord]:
        """Requests of an arm, in one cell or in all."""
        return [request for run in self.runs(mode, task, concurrency) for request in self._requests[run.run]]

    def throughput_of(self, run: RunRecord) -> float:
        """Output tokens/s."""
        return metrics.output_throughput(self._requests[run.run], run.wall_s)

    def throughput(self, mode: str, task: str, concurrency: int) -> dict[int, float]:
        """Output tokens/s by repeat."""
        return {run.run.repeat: self.throughput_of(run) for run in self.runs(mode, task, concurrency)}

    def first_differences(self, mode: str) -> tuple[int, ...]:
        """Per answer that differs from the ``ar`` arm's in any cell: the first output token that does."""
        cells = [(t, c) for t in self.tasks for c in self.concurrencies]
        return tuple(
            first
            for cell in cells
            for first in metrics.agreement(self.requests(mode, *cell), self.requests(AR, *cell)).first_differences
        )

    def write_csv(self, path: Path) -> None:
        write_csv(path, Row, self.rows)

    def _row(self, mode: str, task: str, concurrency: int) -> Row:
        requests, runs = self.requests(mode, task, concurrency), self.runs(mode, task, concurrency)
        throughput = self.throughput(mode, task, concurrency)
        speeds = np.array(list(throughput.values()))
        gain = metrics.speed_up(throughput, self.throughput(AR, task, concurrency))
        agreement = metrics.agreement(requests, self.requests(AR, task, concurrency) if mode != AR else [])
        ttft_p50, _, ttft_p99 = metrics.percentiles(metrics.ttfts(requests))
        tpot_p50, tpot_p95, tpot_p99 = metrics.percentiles(metrics.tpots(requests))
        return Row(
            mode=mode,
            task=task,
            concurrency=concurrency,
            repeats=len(speeds),
            requests=len(requests),
            throughput=float(np.median(speeds)),
            spread=float(np.ptp(speeds) / np.median(speeds)),
            speed_up=gain.ratio,
            speed_up_low=gain.low,
            speed_up_high=gain.high,
            decode=float(np.median([metrics.decode_throughput(self._requests[run.run]) for run in runs])),
            ttft_p50=ttft_p50,
            ttft_p99=ttft_p99,
            tpot_p50=tpot_p50,
            tpot_p95=tpot_p95,
            tpot_p99=tpot_p99,
            accept_macro=metrics.accept_length_macro(requests),
            accept_micro=metrics.accept_length_micro(requests),
            committed=metrics.committed_per_step(requests),
            width=metrics.mean_width(runs),
            step_s=metrics.step_seconds(requests),
            host_s=metrics.host_seconds_per_step(requests, runs),
            accuracy=metrics.accuracy(requests),
            equal=agreement.equal,
            compared=agreement.compared,
            load=max(run.load_average for run in runs),
        )


def _unique(values: Sequence[str], first: str | None = None) -> list[str]:
    names = list(dict.fromkeys(values))
    return sorted(names, key=lambda name: name != first) if first in names else names
