"""Figures of a benchmark's runs, as SGLang's load generator measured them."""

from __future__ import annotations

import math
import operator
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np
from rich.console import Console

from sglang_dflash.errors import DFlashError
from sglang_dflash_lab.bench import results
from sglang_dflash_lab.bench.arms import AR
from sglang_dflash_lab.bench.results import Row
from sglang_dflash_lab.tables import MISSING, Table

NAN = math.nan
RESAMPLES = 10_000
BUSY = 1.5  # load per core that distorts a run
LATENCIES = {
    f"{name}_p{p}": f"{kind}_{name}_ms" for name in ("ttft", "tpot") for p, kind in ((50, "median"), (99, "p99"))
}


def speed_up(speeds: dict[int, float], baseline: dict[int, float], seed: int = 0) -> tuple[float, float, float]:
    """Return the ratio of median throughputs and its 95 % interval, NaN for fewer than three repeats.

    Percentile bootstrap (Efron & Tibshirani 1993, chapter 13) over repeats, resampled in pairs because the runs of a
    repeat are adjacent in time.

    Args:
        speeds, baseline: tokens/s by repeat.
    """
    repeats = sorted(speeds.keys() & baseline.keys())
    if not repeats:
        return NAN, NAN, NAN
    ours, theirs = (np.array([each[repeat] for repeat in repeats]) for each in (speeds, baseline))
    ratio = float(np.median(ours) / np.median(theirs))
    if len(repeats) < 3:
        return ratio, NAN, NAN
    picks = np.random.default_rng(seed).integers(len(repeats), size=(RESAMPLES, len(repeats)))
    ratios = np.median(ours[picks], axis=1) / np.median(theirs[picks], axis=1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return ratio, float(low), float(high)


@dataclass(frozen=True)
class Figures:
    """One cell of the tables.

    Attributes:
        throughput: output tokens/s including prefill, median over repeats; ``spread``: (max - min) / median.
        speed_up, low, high: over the ``ar`` arm of the cell, NaN without one.
        ttft_*, tpot_*: milliseconds, median over repeats.
        accept: tokens per verify step, mean over repeats; NaN without speculation.
        card_accept: tokens / verify steps of an answer, mean over answers (the cards' definition); NaN without any.
        width: mean width of our worker's blocks, else NaN.
        equal, compared: answers equal to the ``ar`` arm's of the same repeat, of the compared ones.
        load: highest 1-minute load average before a run.
    """

    mode: str
    task: str
    concurrency: int
    repeats: int
    throughput: float
    spread: float
    speed_up: float
    low: float
    high: float
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float
    accept: float
    card_accept: float
    width: float
    equal: int
    compared: int
    load: float


class Summary:
    """Figures of a results folder in order of measurement; raises a DFlashError without a finished run."""

    def __init__(self, folder: Path) -> None:
        self.provenance, self.servers = results.read(folder, "provenance"), results.read(folder, "server")
        # Sampled answers of two arms differ.
        self._greedy = all(row["settings"]["temperature"] == 0 for row in self.provenance)
        self._runs: dict[tuple[str, str, int], dict[int, Row]] = defaultdict(dict)
        for run in results.read(folder, "run"):
            self._runs[run["mode"], run["task"], run["concurrency"]][run["repeat"]] = run
        if not self._runs:
            raise DFlashError(
                f"no finished run in {folder / results.FILE_NAME}",
                remedy="run `sglang-dflash bench --out`, or give its folder",
            )
        self.modes = sorted(dict.fromkeys(mode for mode, _, _ in self._runs), key=lambda mode: mode != AR)
        self.tasks = list(dict.fromkeys(task for _, task, _ in self._runs))
        self.concurrencies = sorted({concurrency for _, _, concurrency in self._runs})
        cells = [(m, t, c) for t in self.tasks for c in self.concurrencies for m in self.modes]
        self.repeats = sorted({repeat for runs in self._runs.values() for repeat in runs})
        self.rows = {cell: self._figures(*cell) for cell in cells if cell in self._runs}

    def speeds(self, mode: str, task: str, concurrency: int) -> dict[int, float]:
        """Return output tokens/s by repeat."""
        runs = self._runs.get((mode, task, concurrency), {})
        return {repeat: run["output_throughput"] for repeat, run in runs.items()}

    def totals(self) -> dict[str, float]:
        """Return output tokens/s by arm over the runs that all arms have; empty without one."""
        by_arm: dict[str, dict[Any, Row]] = defaultdict(dict)
        for (mode, *cell), runs in self._runs.items():
            by_arm[mode] |= {(*cell, repeat): run for repeat, run in runs.items()}
        shared = set.intersection(*map(set, by_arm.values()))
        speeds = {mode: [by_arm[mode][cell]["output_throughput"] for cell in shared] for mode in self.modes}
        seconds = {mode: [by_arm[mode][cell]["duration"] for cell in shared] for mode in self.modes}
        return {mode: float(np.average(speeds[mode], weights=seconds[mode])) for mode in self.modes if shared}

    def _figures(self, mode: str, task: str, concurrency: int) -> Figures:
        runs = self._runs[mode, task, concurrency]
        ours, plain = self.speeds(mode, task, concurrency), self.speeds(AR, task, concurrency)
        widths, equal, compared = Counter[str](), 0, 0
        for repeat, run in runs.items():
            widths.update(run["worker"].get("steps_by_width", {}))
            if mode != AR and repeat in plain and self._greedy:
                texts = self._runs[AR, task, concurrency][repeat]["generated_texts"]
                equal += sum(map(operator.eq, run["generated_texts"], texts))
                compared += len(texts)
        lengths = [run["accept_length"] for run in runs.values() if run["accept_length"]]
        answers = [length for run in runs.values() for length in run.get("accept_lengths", ()) if length]
        values = list(ours.values())
        throughput = float(np.median(values))
        latencies: dict[str, Any] = {
            field: float(np.median([run[name] for run in runs.values()])) for field, name in LATENCIES.items()
        }
        gain: dict[str, Any] = dict(zip(("speed_up", "low", "high"), speed_up(ours, plain), strict=True))
        return Figures(
            **{"mode": mode, "task": task, "concurrency": concurrency, "repeats": len(ours), **gain, **latencies},
            throughput=throughput,
            spread=float(np.ptp(values) / throughput),
            accept=float(np.mean(lengths)) if lengths else NAN,
            card_accept=float(np.mean(answers)) if answers else NAN,
            width=sum(int(width) * steps for width, steps in widths.items()) / widths.total() if widths else NAN,
            equal=equal,
            compared=compared,
            load=max(run["load_average"] for run in runs.values()),
        )


def conclusion(summary: Summary) -> Iterator[str]:
    for mode in summary.modes:
        rows = [row for row in summary.rows.values() if row.mode == mode != AR and not math.isnan(row.speed_up)]
        figures = list[str]()
        for users in summary.concurrencies:
            if ratios := [row.speed_up for row in rows if row.concurrency == users]:
                unit = "" if figures else " user" + "s" * (users > 1)
                figures.append(f"{geometric_mean(ratios):.1f}x for {users}{unit}")
        if compared := sum(row.compared for row in rows):
            figures.append(f"{sum(row.equal for row in rows)} of {compared} answers identical")
        if figures:
            yield f"{mode} over plain decoding: {', '.join(figures)}"


def warnings(summary: Summary) -> Iterator[str]:
    for mode in summary.modes:
        rows = [row for row in summary.rows.values() if row.mode == mode != AR]
        if different := sum(row.compared - row.equal for row in rows):
            yield f"{mode}: {different} of {sum(row.compared for row in rows)} answers differ from plain decoding's"
        for row in rows:
            # The upper end of the interval; without an interval, the ratio.
            if (row.speed_up if math.isnan(row.high) else row.high) < 1:
                yield f"{mode} is slower than plain decoding: {row.task} at c={row.concurrency} ({row.speed_up:.2f}x)"
    cores, load = summary.provenance[-1]["hardware"]["cores"], max(row.load for row in summary.rows.values())
    if load > BUSY * cores:
        yield f"the machine was busy: load average up to {load:.1f} before a run, on {cores} CPU core(s)"


def number(value: float, digits: int = 2) -> str:
    return MISSING if math.isnan(value) else f"{value:.{digits}f}"


def tables(summary: Summary) -> Iterator[Table]:
    by_cell = []
    for task in summary.tasks:
        for concurrency in summary.concurrencies:
            rows = [summary.rows.get((mode, task, concurrency)) for mode in summary.modes]
            by_cell.append([task, str(concurrency), *(_speed(row) if row else MISSING for row in rows)])
    yield Table(
        "Throughput and speed-up",
        "output tokens/s, prefill included, median over repeats (speed-up over ar, which is plain decoding "
        "[95 % bootstrap interval]); c: concurrent users",
        ["task", "c", *summary.modes],
        by_cell,
    )
    yield Table(
        "Details",
        "milliseconds; accept: tokens per verify step of the run; as cards: tokens / verify steps of an answer, mean "
        "over answers; width: mean block of our worker; spread: (max - min) / median of the throughput; equal: answers "
        "whose text is the ar arm's in the same repeat; load: before a run",
        ["mode", "task", "c", "TTFT p50", "p99", "TPOT p50", "p99"]
        + ["accept", "as cards", "width", "spread", "load", "equal to ar"],
        [
            [row.mode, row.task, str(row.concurrency)]
            + [number(value) for value in (row.ttft_p50, row.ttft_p99, row.tpot_p50, row.tpot_p99)]
            + [number(row.accept), number(row.card_accept)]
            + [number(row.width, 1), f"{100 * row.spread:.0f} %", number(row.load, 1)]
            + [f"{row.equal} / {row.compared}" if row.compared else MISSING]
            for row in summary.rows.values()
        ],
    )


def print_results(folder: Path, console: Console) -> None:
    summary = Summary(folder)
    for table in tables(summary):
        table.print(console)
    for warning in warnings(summary):
        console.print(f"warning: {warning}")
    console.print(f"rows: {folder / results.FILE_NAME}; page: sglang-dflash report {folder}", highlight=False)
    console.print("", *conclusion(summary), sep="\n", style="bold", highlight=False)


def _speed(row: Figures) -> str:
    if math.isnan(row.speed_up) or row.mode == AR:
        return f"{row.throughput:.1f}"
    interval = "" if math.isnan(row.low) else f" [{row.low:.2f}, {row.high:.2f}]"
    return f"{row.throughput:.1f} ({row.speed_up:.2f}x{interval})"
