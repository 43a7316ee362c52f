"""A results folder as one HTML page, Markdown tables and CSV."""

from __future__ import annotations

import base64
import csv
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure

from sglang_dflash_lab.bench.arms import AR
from sglang_dflash_lab.bench.figures import Figures, Summary, conclusion, tables, warnings
from sglang_dflash_lab.bench.provenance import describe_hardware

STYLE: Any = {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25}


def write_report(folder: Path) -> Path:
    """Write ``report.html``, its pictures, ``tables.md`` and ``summary.csv``; return the page's path."""
    summary = Summary(folder)
    last = summary.provenance[-1]
    with (folder / "summary.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(Figures.__annotations__))
        writer.writeheader()
        writer.writerows(asdict(row) for row in summary.rows.values())
    versions, hardware = last["versions"], describe_hardware(last["hardware"])
    measured = f"{hardware}; SGLang {versions['sglang']}, commit {last['commit']}, {last['time']}"
    head = f"```bash\n{last['command']}\n```\n\n{measured}.\n"
    found = [f"* {line}\n" for line in (*conclusion(summary), *warnings(summary))]
    shown = [f"### {table.title}\n\n{table.markdown()}\n\n{table.caption}\n" for table in tables(summary)]
    (folder / "tables.md").write_text("\n".join([head, *found, *shown]))
    environment = Environment(
        loader=PackageLoader("sglang_dflash_lab.bench"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    page = folder / "report.html"
    page.write_text(
        environment.get_template("report.html").render(
            settings=last["settings"],
            hardware=hardware,
            versions=versions,
            conclusion=list(conclusion(summary)),
            warnings=list(warnings(summary)),
            compared=sum(row.compared for row in summary.rows.values()),
            tables=list(tables(summary)),
            pictures=[
                {"caption": caption, "base64": _png(figure, folder / f"picture-{number}.png")}
                for number, (caption, figure) in enumerate(plots(summary), 1)
            ],
            provenance=summary.provenance,
            servers=summary.servers,
        )
    )
    return page


def plots(summary: Summary) -> Iterator[tuple[str, Figure]]:
    modes = [mode for mode in summary.modes if mode != AR]
    if modes and AR in summary.modes:
        caption = "Speed-up over plain decoding, with its 95 % interval"
        yield caption, _bars(summary, modes, lambda row: (row.speed_up, row.low, row.high), "speed-up")
    if modes and len(summary.tasks) * len(summary.concurrencies) > 1 and summary.totals():
        caption = (
            "Speed while task and number of users (c) change; legend: tokens per second of all runs, over the first"
        )
        yield caption, _traffic(summary)
    if modes:
        caption = "Accept length: tokens per verify step, accepted drafts and the target's own token"
        yield caption, _bars(summary, modes, lambda row: (row.accept, math.nan, math.nan), "tokens per step")


def _traffic(summary: Summary) -> Figure:
    cells = list(product(summary.repeats, summary.concurrencies, summary.tasks))
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(10, 3.6), layout="constrained")
    totals = summary.totals()
    for mode in summary.modes:
        speeds = [summary.speeds(mode, task, users).get(repeat, math.nan) for repeat, users, task in cells]
        is_last = mode == summary.modes[-1]
        color, width = ("black", 2.2) if is_last else (None, 1.3)
        label = f"{mode}: {totals[mode] / totals[summary.modes[0]]:.2f}x"
        axes.step(range(len(cells)), speeds, where="mid", label=label, color=color, linewidth=width)
    axes.set_yscale("log")
    axes.set_ylabel("tokens/s")
    axes.set_xticks(range(len(cells)), [f"{task}\nc={users}" for _, users, task in cells], fontsize=6, rotation=45)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _bars(
    summary: Summary, modes: list[str], bar: Callable[[Figures], tuple[float, float, float]], label: str
) -> Figure:
    count, missing = len(summary.tasks), (math.nan,) * 3
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(
            1, count, figsize=(max(4.5, 2.6 * count), 3), sharey=True, squeeze=False, layout="constrained"
        )
    for axes, task in zip(grid[0], summary.tasks, strict=True):
        for index, mode in enumerate(modes):
            rows = [summary.rows.get((mode, task, concurrency)) for concurrency in summary.concurrencies]
            heights, low, high = np.array([bar(row) if row else missing for row in rows]).T
            x = np.arange(len(rows)) + (index - (len(modes) - 1) / 2) * 0.8 / len(modes)
            interval = np.clip([heights - low, high - heights], 0, None)
            bars = axes.bar(x, heights, 0.8 / len(modes), yerr=interval, capsize=2, label=mode)
            axes.bar_label(bars, fmt="%.1f", fontsize=8, padding=1)
        axes.set_title(task)
        axes.set_xticks(
            range(len(summary.concurrencies)), [f"{c} user{'s' if c > 1 else ''}" for c in summary.concurrencies]
        )
    grid[0, 0].set_ylabel(label)
    if len(modes) > 1:
        grid[0, -1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _png(figure: Figure, path: Path) -> str:
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return base64.b64encode(path.read_bytes()).decode()
