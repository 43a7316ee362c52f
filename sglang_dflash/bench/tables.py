"""The cards' tables, as text cells: shared by the terminal, Markdown and HTML."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table as RichTable

from sglang_dflash.bench import metrics
from sglang_dflash.bench.modes import AR
from sglang_dflash.bench.summary import Row, Summary

MISSING = "–"


@dataclass(frozen=True)
class Table:
    """A title, a caption that defines the cells, column names and rows of text."""

    title: str
    caption: str
    columns: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)

    def print(self, console: Console) -> None:
        table = RichTable(title=self.title, caption=self.caption, title_justify="left", caption_justify="left")
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="left" if number == 0 else "right", no_wrap=True)
        for row in self.rows:
            table.add_row(*row)
        console.print(table)


def wide_console() -> Console:
    """The terminal; a file or pipe gets lines long enough for every table."""
    console = Console(soft_wrap=True)
    return console if console.is_terminal else Console(soft_wrap=True, width=180)


def all_tables(summary: Summary) -> list[Table]:
    """Every table of a benchmark; those of speculation only where an arm speculates."""
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
    return Table(
        "Latency",
        "milliseconds, over all requests; decode: tokens/s of one user after the first token; "
        "spread: (max - min) / median of the throughput over repeats; "
        "load: highest 1-minute load average before a run",
        ["mode", "task", "c", "TTFT p50", "p99", "TPOT p50", "p95", "p99", "decode tok/s", "spread", "load"],
        [
            [
                row.mode, row.task, str(row.concurrency), *(
                    _milliseconds(v) for v in (row.ttft_p50, row.ttft_p99, row.tpot_p50, row.tpot_p95, row.tpot_p99)
                ),
                number(row.decode, 1), _percent(row.spread), number(row.load, 1),
            ]
            for row in summary.rows
        ],
    )  # fmt: skip


def acceptance_detail(summary: Summary, modes: list[str]) -> Table:
    return Table(
        "Acceptance and steps",
        "macro: mean over turns; micro: sum of tokens / sum of steps; committed: accepted drafts + bonus per step; "
        "width: block width per step of our worker; step: decode milliseconds per verify step of a request; "
        "host: those outside draft and verify, where the server measures stage times",
        ["mode", "task", "c", "macro", "micro", "committed", "width", "step ms", "host ms"],
        [
            [
                row.mode, row.task, str(row.concurrency), number(row.accept_macro), number(row.accept_micro),
                number(row.committed), number(row.width, 1), _milliseconds(row.step_s),
            ]
            for row in summary.rows
            if row.mode in modes
        ],
    )  # fmt: skip


def step_breakdown(summary: Summary, modes: list[str]) -> Table | None:
    """Where a decode step's time goes, at concurrency 1; None unless a server measured stage times."""
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
    def cell(row: Row) -> list[str]:
        equal = f"{row.equal} / {row.compared}" if row.compared else MISSING
        return [row.mode, row.task, str(row.concurrency), str(row.requests), _percent(row.accuracy), equal]

    return Table(
        "Answers",
        "accuracy: exact match, or generated code that passes its tests; "
        "equal: answers whose tokens are those of the ar arm on the same prompt, concurrency and repeat",
        ["mode", "task", "c", "answers", "accuracy", "equal to ar"],
        [cell(row) for row in summary.rows],
    )


def _by_cell(summary: Summary, title: str, caption: str, modes: list[str], cell: Callable[[Row], str]) -> Table:
    rows = []
    for task in summary.tasks:
        for concurrency in summary.concurrencies:
            found = [summary.row(mode, task, concurrency) for mode in modes]
            if any(found):
                rows.append([task, str(concurrency), *(cell(row) if row else MISSING for row in found)])
    return Table(title, caption, ["task", "c", *modes], rows)


def number(value: float, digits: int = 2) -> str:
    return MISSING if math.isnan(value) else f"{value:.{digits}f}"


def _milliseconds(value: float) -> str:
    return number(1000 * value, 2)


def _percent(value: float) -> str:
    return MISSING if math.isnan(value) else f"{100 * value:.1f} %"
