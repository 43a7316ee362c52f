"""The cards' tables, as text cells: shared by the terminal, Markdown and HTML."""

from __future__ import annotations

import math
from collections.abc import Callable

from sglang_dflash.diagnose.tables import MISSING, Table
from sglang_dflash_lab.bench import metrics
from sglang_dflash_lab.bench.modes import AR
from sglang_dflash_lab.bench.summary import Row, Summary


def all_tables(summary: Summary) -> list[Table]:
    """Every table of a benchmark; those of speculation only if an arm speculates."""
    speculated = [mode for mode in summary.modes if mode != AR]
    tables = [throughput(summary), latency(summary)]
    if speculated:
        tables += [accept_length(summary, speculated), acceptance_detail(summary, speculated)]
        if steps := step_breakdown(summary, speculated):
            tables.append(steps)
    return [*tables, answers(summary)]


def throughput(summary: Summary) -> Table:
    def cell(row: Row) -> str:
        if math.isnan(row.speed_up) or row.mode == AR:
            return f"{row.throughput:.1f}"
        interval = "" if math.isnan(row.speed_up_low) else f" [{row.speed_up_low:.2f}, {row.speed_up_high:.2f}]"
        return f"{row.throughput:.1f} ({row.speed_up:.2f}x{interval})"

    return _by_cell(
        summary,
        "Throughput and speed-up",
        "output tokens/s end to end, prefill included, median over repeats "
        "(speed-up over ar [95 % bootstrap interval over repeats])",
        summary.modes,
        cell,
    )


def accept_length(summary: Summary, modes: list[str]) -> Table:
    return _by_cell(
        summary,
        "Accept length",
        "completion tokens / verify steps per turn, averaged over turns",
        modes,
        lambda row: number(row.accept_macro),
    )


def latency(summary: Summary) -> Table:
    return _by_row(
        "Latency",
        "milliseconds, over all requests; decode: tokens/s of one user after the first token; "
        "spread: (max - min) / median of the throughput over repeats; "
        "load: highest 1-minute load average before a run",
        summary.rows,
        [
            ("TTFT p50", lambda row: _milliseconds(row.ttft_p50)),
            ("p99", lambda row: _milliseconds(row.ttft_p99)),
            ("TPOT p50", lambda row: _milliseconds(row.tpot_p50)),
            ("p95", lambda row: _milliseconds(row.tpot_p95)),
            ("p99", lambda row: _milliseconds(row.tpot_p99)),
            ("decode tok/s", lambda row: number(row.decode, 1)),
            ("spread", lambda row: _percent(row.spread)),
            ("load", lambda row: number(row.load, 1)),
        ],
    )


def acceptance_detail(summary: Summary, modes: list[str]) -> Table:
    return _by_row(
        "Acceptance and steps",
        "macro: mean over turns; micro: sum of tokens / sum of steps; committed: accepted drafts + bonus per step; "
        "width: block width per step of our worker; step: decode milliseconds per verify step of a request; "
        "host: those outside draft and verify, if the server measures stage times",
        [row for row in summary.rows if row.mode in modes],
        [
            ("macro", lambda row: number(row.accept_macro)),
            ("micro", lambda row: number(row.accept_micro)),
            ("committed", lambda row: number(row.committed)),
            ("width", lambda row: number(row.width, 1)),
            ("step ms", lambda row: _milliseconds(row.step_s)),
            ("host ms", lambda row: _milliseconds(row.host_s)),
        ],
    )


def step_breakdown(summary: Summary, modes: list[str]) -> Table | None:
    """A decode step's time by stage, at concurrency 1; None unless a server measured stage times."""
    rows = []
    for mode in modes:
        requests, runs = summary.requests(mode, concurrency=1), summary.runs(mode, concurrency=1)
        stages = metrics.stage_seconds_per_step(runs)
        if stages:
            step = metrics.step_seconds(requests)
            rest = step - sum(stages.values())
            times = {**stages, "scheduler, detokenizer, HTTP": rest, "step": step}
            rows += [[mode, name, _milliseconds(time), _percent(time / step)] for name, time in times.items()]
    if not rows:
        return None
    return Table(
        "Where a step's time goes",
        "milliseconds per verify step at concurrency 1; draft and verify are the drafter's and the target's forward "
        "with what prepares them, the rest of the named stages are our worker's own work",
        ["mode", "stage", "ms", "share"],
        rows,
    )


def answers(summary: Summary) -> Table:
    return _by_row(
        "Answers",
        "accuracy: exact match, or generated code that passes its tests; "
        "equal: answers whose tokens are those of the ar arm on the same prompt, concurrency and repeat",
        summary.rows,
        [
            ("answers", lambda row: str(row.requests)),
            ("accuracy", lambda row: _percent(row.accuracy)),
            ("equal to ar", lambda row: f"{row.equal} / {row.compared}" if row.compared else MISSING),
        ],
    )


def _by_row(title: str, caption: str, rows: list[Row], columns: list[tuple[str, Callable[[Row], str]]]) -> Table:
    """One line per row of the summary; each column is a heading with what stands under it."""
    cells = [[row.mode, row.task, str(row.concurrency), *(cell(row) for _, cell in columns)] for row in rows]
    return Table(title, caption, ["mode", "task", "c", *(heading for heading, _ in columns)], cells)


def _by_cell(summary: Summary, title: str, caption: str, modes: list[str], cell: Callable[[Row], str]) -> Table:
    """One line per task and concurrency, one column per arm."""
    rows = []
    for task in summary.tasks:
        for concurrency in summary.concurrencies:
            found = [summary.row(mode, task, concurrency) for mode in modes]
            if any(found):
                rows.append([task, str(concurrency), *(cell(row) if row else MISSING for row in found)])
    return Table(title, caption, ["task", "c", *modes], rows)


def number(value: float, digits: int = 2) -> str:
    return MISSING if math.isnan(value) else f"{value:.{digits}f}"


def _milliseconds(seconds: float) -> str:
    return number(1000 * seconds)


def _percent(value: float) -> str:
    return MISSING if math.isnan(value) else f"{100 * value:.1f} %"
