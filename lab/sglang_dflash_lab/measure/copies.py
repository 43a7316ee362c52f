"""Copied blocks off and on, a results folder per drafter: ``python -m sglang_dflash_lab.measure.copies FOLDER ...``.

The arms are those of :data:`RATIOS`. Speed is tokens per second of a user after the first token, over all requests of a
run: prefill is the same with and without copies, and with a long prompt it is most of the time. A ratio is taken within
each repeat, whose arms run one after the other: its median, and its range.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import exp, log
from pathlib import Path
from statistics import mean, median
from typing import Annotated

import typer

from sglang_dflash_lab.bench import results
from sglang_dflash_lab.bench.metrics import accept_length_micro
from sglang_dflash_lab.bench.provenance import describe_hardware, hardware
from sglang_dflash_lab.bench.summary import Summary
from sglang_dflash_lab.bench.tables import MISSING, Table, number

OFF, ON = "+SGLANG_DFLASH_COPIES=0", "+SGLANG_DFLASH_COPIES=1"
FIXED, ADAPTIVE, WIDE = "dflash:16", "adaptive:16", "adaptive:32" + ON
# What is compared with what.
RATIOS = {
    "fixed": (FIXED + ON, FIXED + OFF),
    "adaptive": (ADAPTIVE + ON, ADAPTIVE + OFF),
    "wide": (WIDE, ADAPTIVE + ON),
}
COLUMNS = [
    "drafter", "task", "c", "accept off", "on", "fixed off", "on", "on over off",
    "adaptive off", "on", "on over off", "up to 32", "32 over 16",
]  # fmt: skip


class Cells:
    """Accept lengths and decode speeds of a results folder, by arm, task and concurrency."""

    def __init__(self, folder: Path) -> None:
        self.summary = Summary(results.read_finished(folder))

    def accept_length(self, arm: str, task: str, concurrency: int) -> float:
        return accept_length_micro(self.summary.requests(arm, task, concurrency))

    def speeds(self, arm: str, task: str, concurrency: int) -> dict[int, float]:
        """Tokens per second by repeat."""
        found: defaultdict[int, list[results.RequestRecord]] = defaultdict(list)
        for request in self.summary.requests(arm, task, concurrency):
            found[request.run.repeat].append(request)
        return {
            # Not a mean of each request's own: one whose second event brings all the rest would have no time at all.
            repeat: sum(r.completion_tokens - 1 for r in requests) / sum(r.latency_s - r.ttft_s for r in requests)
            for repeat, requests in found.items()
        }

    def ratios(self, name: str, task: str, concurrency: int) -> list[float]:
        """One of :data:`RATIOS`, by repeat."""
        over, under = (self.speeds(arm, task, concurrency) for arm in RATIOS[name])
        return [over[repeat] / under[repeat] for repeat in sorted(over.keys() & under.keys())]

    def row(self, task: str, concurrency: int) -> list[str]:
        """Cells under :data:`COLUMNS` from the accept length on; an arm that was not measured has none."""
        lengths = [self.accept_length(FIXED + switch, task, concurrency) for switch in (OFF, ON)]
        cells = [*map(number, lengths)]
        for name, (over, under) in RATIOS.items():
            cells += [self._speed(arm, task, concurrency) for arm in ((over,) if name == "wide" else (under, over))]
            ratios = self.ratios(name, task, concurrency)
            cells.append(f"{median(ratios):.2f}x [{min(ratios):.2f}, {max(ratios):.2f}]" if ratios else MISSING)
        return cells

    def _speed(self, arm: str, task: str, concurrency: int) -> str:
        speeds = self.speeds(arm, task, concurrency)
        return number(median(speeds.values()), 0) if speeds else MISSING


def report(folders: Sequence[Path]) -> Iterator[str]:
    """The table, then for each drafter the geometric means over the edits and over everything else that was asked."""
    rows, gains = [], []
    for folder in folders:
        cells = Cells(folder)
        by_kind: defaultdict[str, dict[str, list[float]]] = defaultdict(lambda: {name: [] for name in RATIOS})
        for task in cells.summary.tasks:
            for concurrency in cells.summary.concurrencies:
                rows.append([folder.name, task, str(concurrency), *cells.row(task, concurrency)])
                for name in RATIOS:
                    by_kind[task.partition("-")[0]][name] += cells.ratios(name, task, concurrency)
        gains += [
            [folder.name, kind, *(f"{exp(mean(map(log, r))):.2f}x" if r else MISSING for r in by_ratio.values())]
            for kind, by_ratio in by_kind.items()
        ]
    yield Table("Copied blocks", "", COLUMNS, rows).markdown()
    yield ""
    yield Table("Geometric means", "", ["drafter", "tasks", *RATIOS], gains).markdown()


def main(folders: Annotated[list[Path], typer.Argument(help="Results with the arms of this script.")]) -> None:
    """Print accept lengths and speeds with copies off and on, and how much faster on is."""
    typer.echo(describe_hardware(hardware()))
    typer.echo("\n".join(report(folders)))


if __name__ == "__main__":
    typer.run(main)
