"""The report's figures, each a function from a summary to a matplotlib figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

from sglang_dflash.bench import metrics
from sglang_dflash.bench.modes import AR
from sglang_dflash.bench.published import card_of, published_accept_length, published_speed_up
from sglang_dflash.bench.summary import Row, Summary

_COLORS = plt.get_cmap("tab10").colors  # type: ignore[attr-defined]
_GREY = "#8a8a8a"
_STYLE: Any = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "font.size": 9,
}


def all_plots(summary: Summary) -> Iterator[tuple[str, str, Figure]]:
    """File name, caption and figure; those of speculation only where an arm speculates."""
    speculated = [mode for mode in summary.modes if mode != AR]
    card = "; ◇: the card's" if card_of(summary) else ""
    plots: list[tuple[str, str, Callable[[Summary, list[str]], Figure]]] = []
    if AR in summary.modes and speculated:
        plots.append(("speed_up", f"Speed-up over plain decoding; bars: 95 % interval{card}", speed_up))
    if speculated:
        plots.append(("accept_length", f"Accept length, mean over turns{card}", accept_length))
        plots.append(("accept_histogram", "Tokens per verify step, accepted drafts + bonus", accept_histogram))
    plots.append(("latency", "Share of requests answered within a time, by concurrency", latency))
    plots.append(("throughput_over_time", "Throughput of every run, in the order measured", throughput_over_time))
    if any(run.worker for run in summary.results.runs):
        plots.append(("width", "Mean block width of every run of our worker, in the order measured", width_over_time))
    with plt.rc_context(_STYLE):
        for name, caption, draw in plots:
            figure = draw(summary, speculated)
            yield name, caption, figure
            plt.close(figure)


def speed_up(summary: Summary, modes: list[str]) -> Figure:
    card = card_of(summary)

    def bar(row: Row) -> tuple[float, float, float]:
        return row.speed_up, row.speed_up - row.speed_up_low, row.speed_up_high - row.speed_up

    def published(mode: str, task: str, concurrency: int) -> float | None:
        return published_speed_up(card, mode, task, concurrency) if card else None

    figure = _bars_by_cell(summary, modes, bar, published)
    for axes in figure.axes:
        axes.axhline(1, color="black", linewidth=0.8)
    figure.axes[0].set_ylabel("speed-up")
    return figure


def accept_length(summary: Summary, modes: list[str]) -> Figure:
    card = card_of(summary)

    def bar(row: Row) -> tuple[float, float, float]:
        return row.accept_macro, math.nan, math.nan

    def published(mode: str, task: str, _: int) -> float | None:
        return published_accept_length(card, mode, task) if card else None

    figure = _bars_by_cell(summary, modes, bar, published)
    figure.axes[0].set_ylabel("tokens per verify step")
    return figure


def accept_histogram(summary: Summary, modes: list[str]) -> Figure:
    figure, grid = _row_of_axes(len(modes))
    for axes, mode in zip(grid, modes, strict=True):
        counts = metrics.accepted_histogram(summary.requests(mode))
        if len(counts):
            axes.bar(np.arange(len(counts)) + 1, counts / counts.sum(), color=_color(summary, mode))
        axes.set_title(mode)
        axes.set_xlabel("tokens per step")
    grid[0].set_ylabel("share of steps")
    return figure


def latency(summary: Summary, _: list[str]) -> Figure:
    figure, grid = _row_of_axes(len(summary.concurrencies))
    for axes, concurrency in zip(grid, summary.concurrencies, strict=True):
        for mode in summary.modes:
            times = np.sort(metrics.latencies(summary.requests(mode, concurrency=concurrency)))
            if len(times):
                share = np.arange(1, len(times) + 1) / len(times)
                axes.step(times, share, where="post", label=mode, color=_color(summary, mode))
        axes.set_title(f"concurrency {concurrency}")
        axes.set_xlabel("seconds to the last token")
        axes.set_xlim(left=0)
    grid[0].set_ylabel("share of requests")
    grid[-1].legend(fontsize=8)
    return figure


def throughput_over_time(summary: Summary, _: list[str]) -> Figure:
    """A machine that drifts shows as a slope common to all arms."""
    figure, axes = plt.subplots(figsize=(9, 3), layout="constrained")
    runs = summary.results.runs
    for mode in summary.modes:
        for concurrency, marker in zip(summary.concurrencies, "os^Dv*Px", strict=False):
            points = [
                (index, summary.throughput(mode, run.run.task, concurrency)[run.run.repeat])
                for index, run in enumerate(runs)
                if (run.run.mode, run.run.concurrency) == (mode, concurrency)
            ]
            if points:
                label = f"{mode}, c={concurrency}"
                axes.plot(*zip(*points, strict=True), marker, ms=4, color=_color(summary, mode), label=label)
    axes.set_xlabel("run")
    axes.set_ylabel("output tok/s")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.legend(fontsize=7, ncols=2, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def width_over_time(summary: Summary, modes: list[str]) -> Figure:
    figure, axes = plt.subplots(figsize=(9, 2.6), layout="constrained")
    for mode in modes:
        points = [
            (index, metrics.mean_width([run]))
            for index, run in enumerate(summary.results.runs)
            if run.run.mode == mode and run.worker
        ]
        if points:
            axes.plot(*zip(*points, strict=True), ".-", color=_color(summary, mode), label=mode)
    axes.set_xlabel("run")
    axes.set_ylabel("tokens per block")
    axes.set_ylim(bottom=0)
    axes.margins(y=0.1)
    axes.legend(fontsize=8, loc="lower right")
    return figure


def _bars_by_cell(
    summary: Summary,
    modes: list[str],
    bar: Callable[[Row], tuple[float, float, float]],
    published: Callable[[str, str, int], float | None],
) -> Figure:
    """One panel per task, one group per concurrency, one bar per arm; `bar` gives height and error down and up."""
    figure, grid = _row_of_axes(len(summary.tasks))
    width = 0.8 / len(modes)
    for axes, task in zip(grid, summary.tasks, strict=True):
        for index, mode in enumerate(modes):
            offset = (index - (len(modes) - 1) / 2) * width
            for group, concurrency in enumerate(summary.concurrencies):
                row = summary.row(mode, task, concurrency)
                if row:
                    height, down, up = bar(row)
                    error: Any = None if math.isnan(down) else [[max(down, 0)], [max(up, 0)]]
                    label = mode if group == 0 else None
                    color = _color(summary, mode)
                    axes.bar(group + offset, height, width, yerr=error, capsize=2, color=color, label=label)
                    axes.annotate(f"{height:.1f}", (group + offset, 0.02), ha="center", fontsize=6, color="white")
                reference = published(mode, task, concurrency)
                if reference is not None:
                    axes.plot(group + offset, reference, "D", ms=5, mfc="white", mec="black")
        axes.set_title(task)
        axes.set_xticks(range(len(summary.concurrencies)), [f"c={c}" for c in summary.concurrencies])
        axes.grid(axis="x", visible=False)
    grid[-1].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _row_of_axes(count: int) -> tuple[Figure, list[Axes]]:
    figure, grid = plt.subplots(
        1, count, figsize=(max(4.5, 2.6 * count), 3), sharey=True, squeeze=False, layout="constrained"
    )
    return figure, list(grid[0])


def _color(summary: Summary, mode: str) -> Any:
    if mode == AR:
        return _GREY
    return _COLORS[[m for m in summary.modes if m != AR].index(mode) % len(_COLORS)]
