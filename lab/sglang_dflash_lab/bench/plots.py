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

from sglang_dflash_lab.bench import metrics
from sglang_dflash_lab.bench.modes import AR
from sglang_dflash_lab.bench.published import card_of
from sglang_dflash_lab.bench.summary import Row, Summary

STYLE: Any = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "font.size": 9,
}
_NO_INTERVAL = (math.nan, math.nan)
_Published = dict[tuple[str, str, int], float]


def all_plots(summary: Summary) -> Iterator[tuple[str, str, Figure]]:
    """File name, caption and figure; those of speculation only if an arm speculates."""
    speculated = [mode for mode in summary.modes if mode != AR]
    card = "; ◇: the card's" if card_of(summary) else ""
    plots: list[tuple[str, str, Callable[[Summary, list[str]], Figure]]] = []
    if AR in summary.modes and speculated:
        plots.append(("speed_up", f"Speed-up over plain decoding; bars: 95 % interval{card}", speed_up))
    if speculated:
        plots.append(("accept_length", f"Accept length, mean over turns{card}", accept_length))
        plots.append(("accept_histogram", "Tokens per verify step, accepted drafts + bonus", accept_histogram))
    plots.append(("latency", "Share of requests answered within a time, by concurrency", latency))
    with plt.rc_context(STYLE):
        for name, caption, draw in plots:
            figure = draw(summary, speculated)
            yield name, caption, figure
            plt.close(figure)


def speed_up(summary: Summary, modes: list[str]) -> Figure:
    card = card_of(summary)
    published = {cell: speed_up for cell, (_, speed_up) in card.speed.items()} if card else {}
    figure = _bars_by_cell(
        summary, modes, lambda row: (row.speed_up, row.speed_up_low, row.speed_up_high), published, "speed-up"
    )
    for axes in figure.axes:
        axes.axhline(1, color="black", linewidth=0.8)
    return figure


def accept_length(summary: Summary, modes: list[str]) -> Figure:
    card = card_of(summary)
    lengths = card.accept_length if card else {}
    published = {(*cell, c): length for cell, length in lengths.items() for c in summary.concurrencies}
    return _bars_by_cell(
        summary, modes, lambda row: (row.accept_macro, *_NO_INTERVAL), published, "tokens per verify step"
    )


def accept_histogram(summary: Summary, modes: list[str]) -> Figure:
    figure, grid = _row_of_axes(len(modes), "share of steps")
    for axes, mode in zip(grid, modes, strict=True):
        counts = np.array(metrics.accepted_histogram(summary.requests(mode)))
        if len(counts):
            axes.bar(np.arange(len(counts)) + 1, counts / counts.sum(), color=color(summary, mode))
        axes.set(title=mode, xlabel="tokens per step")
    return figure


def latency(summary: Summary, _: list[str]) -> Figure:
    figure, grid = _row_of_axes(len(summary.concurrencies), "share of requests")
    for axes, concurrency in zip(grid, summary.concurrencies, strict=True):
        for mode in summary.modes:
            seconds = [request.latency_s for request in summary.requests(mode, concurrency=concurrency)]
            if seconds:
                axes.ecdf(seconds, label=mode, color=color(summary, mode))
        axes.set(title=f"concurrency {concurrency}", xlabel="seconds to the last token")
        axes.set_xlim(left=0)
    grid[-1].legend(fontsize=8)
    return figure


def _bars_by_cell(
    summary: Summary,
    modes: list[str],
    bar: Callable[[Row], tuple[float, float, float]],
    published: _Published,
    label: str,
) -> Figure:
    """One panel per task, one group per concurrency, one bar per arm; ``bar`` gives a height and its interval."""
    figure, grid = _row_of_axes(len(summary.tasks), label)
    width = 0.8 / len(modes)
    for axes, task in zip(grid, summary.tasks, strict=True):
        for index, mode in enumerate(modes):
            x = np.arange(len(summary.concurrencies)) + (index - (len(modes) - 1) / 2) * width
            rows = [summary.row(mode, task, concurrency) for concurrency in summary.concurrencies]
            heights, low, high = np.array([bar(row) if row else (math.nan, *_NO_INTERVAL) for row in rows]).T
            interval = np.clip([heights - low, high - heights], 0, None)
            axes.bar(x, heights, width, yerr=interval, capsize=2, color=color(summary, mode), label=mode)
            for position in np.flatnonzero(~np.isnan(heights)):
                text = f"{heights[position]:.1f}"
                axes.annotate(text, (x[position], 0.02), ha="center", fontsize=6, color="white")
            references = [published.get((mode, task, c), math.nan) for c in summary.concurrencies]
            axes.plot(x, references, "D", ms=5, mfc="white", mec="black")
        axes.set_title(task)
        axes.set_xticks(range(len(summary.concurrencies)), [f"c={c}" for c in summary.concurrencies])
        axes.grid(axis="x", visible=False)
    grid[-1].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _row_of_axes(count: int, label: str) -> tuple[Figure, list[Axes]]:
    """``count`` panels that share the axis called ``label``."""
    figure, grid = plt.subplots(
        1, count, figsize=(max(4.5, 2.6 * count), 3), sharey=True, squeeze=False, layout="constrained"
    )
    grid[0, 0].set_ylabel(label)
    return figure, list(grid[0])


def color(summary: Summary, mode: str) -> str:
    return "#8a8a8a" if mode == AR else f"C{[m for m in summary.modes if m != AR].index(mode)}"
