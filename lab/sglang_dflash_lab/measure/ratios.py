"""Compare arms of a benchmark: ``python -m sglang_dflash_lab.measure.ratios FOLDER… --ratio OVER/UNDER``."""

from __future__ import annotations

from collections.abc import Iterator
from math import exp, log
from pathlib import Path
from statistics import mean, median
from typing import Annotated

import typer

from sglang_dflash.check import user_errors
from sglang_dflash_lab.bench.figures import Summary, number
from sglang_dflash_lab.bench.provenance import describe_hardware, hardware
from sglang_dflash_lab.tables import MISSING, Table


def ratios(summary: Summary, over: str, under: str, task: str, concurrency: int) -> list[float]:
    """Return the ratio of output tokens/s in each repeat that both arms have.

    Args:
        under: comma-separated arms; the one with the highest median counts.
    """
    arms = [summary.speeds(arm, task, concurrency) for arm in under.split(",")]
    best = max((speeds for speeds in arms if speeds), key=lambda speeds: median(speeds.values()), default={})
    ours = summary.speeds(over, task, concurrency)
    return [ours[repeat] / best[repeat] for repeat in sorted(ours.keys() & best.keys())]


def report(folders: list[Path], pairs: list[str]) -> Iterator[str]:
    rows, means = [], []
    for folder in folders:
        summary = Summary(folder)
        found: dict[tuple[str, str], list[float]] = {}
        for task in summary.tasks:
            for concurrency in summary.concurrencies:
                figures = [summary.rows.get((mode, task, concurrency)) for mode in summary.modes]
                cells = [f"{row.throughput:.0f} ({number(row.accept)})" if row else MISSING for row in figures]
                for pair in pairs:
                    over, _, under = pair.partition("/")
                    each = ratios(summary, over, under, task, concurrency)
                    cells.append(f"{median(each):.2f}x [{min(each):.2f}, {max(each):.2f}]" if each else MISSING)
                    found.setdefault((task.partition("-")[0], pair), []).extend(each)
                rows.append([folder.name, task, str(concurrency), *cells])
        means += [[folder.name, *key, f"{exp(mean(map(log, each))):.2f}x"] for key, each in found.items() if each]
        columns = ["results", "task", "c", *summary.modes, *pairs]
    yield Table("", "", columns, rows).markdown()
    yield Table("", "", ["results", "tasks", "ratio", "geometric mean"], means).markdown()


def main(
    folders: Annotated[list[Path], typer.Argument(help="Results of `sglang-dflash bench` with the same arms.")],
    ratio: Annotated[list[str], typer.Option(help="OVER/UNDER; of several comma-separated UNDER the best counts.")],
) -> None:
    """Print tokens/s (accept length) per arm, and ratios within each repeat: median [range]."""
    typer.echo(describe_hardware(hardware()))
    with user_errors():
        typer.echo("\n\n".join(report(folders, ratio)))


if __name__ == "__main__":
    typer.run(main)
