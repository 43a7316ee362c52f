"""What ``width_traffic`` found: tokens per arm, in all and per phase, and a plot over time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure.width_arms import ADAPTIVE
from sglang_dflash.bench.tables import Table


@dataclass(frozen=True)
class Phase:
    """What is asked, and how many requests are in flight, from second ``start`` to ``end``."""

    task: str
    users: int
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


def report(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Tokens per arm in all and as a share of the best other arm's, then per phase tokens per second."""
    phases = [Phase(**phase) for phase in rows[0]["phases"]]
    columns = ["arm", "tokens", *(f"{phase.task} c={phase.users}" for phase in phases)]
    cells = [[row["arm"], f"{row['tokens']:.0f}", *(f"{speed:.0f}" for speed in by_phase(row, phases))] for row in rows]
    yield Table("Traffic", "", columns, cells).markdown()
    totals = {row["arm"]: row["tokens"] for row in rows}
    others = {arm: total for arm, total in totals.items() if arm != ADAPTIVE}
    if ADAPTIVE in totals and others:
        best = max(others, key=others.__getitem__)
        yield f"adaptive over the best other arm ({best}): {totals[ADAPTIVE] / others[best]:.2f}x"


def by_phase(row: Mapping[str, Any], phases: Sequence[Phase]) -> list[float]:
    """Tokens per second of an arm, mean over each phase's bins."""
    means = []
    for phase in phases:
        inside = [s for i, s in enumerate(row["speeds"]) if phase.start <= (i + 0.5) * row["bin_s"] < phase.end]
        means.append(sum(inside) / len(inside))
    return means


def draw(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Tokens per second over time, a line per arm; phases are named above."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(11, 4), layout="constrained")
    for row in rows:
        adaptive = row["arm"] == ADAPTIVE
        times = [(i + 0.5) * row["bin_s"] for i in range(len(row["speeds"]))]
        style: dict[str, Any] = {"color": "black", "linewidth": 2} if adaptive else {"linewidth": 1}
        axes.plot(times, row["speeds"], label=f"{row['arm']}: {row['tokens']:.0f} tokens", **style)
    for phase in rows[0]["phases"]:
        axes.axvline(phase["start"], color="0.8", linewidth=0.8, zorder=0)
        middle = (phase["start"] + phase["end"]) / 2
        label = f"{phase['task']}\nc={phase['users']}"
        axes.text(middle, 1.01, label, transform=axes.get_xaxis_transform(), ha="center", va="bottom", fontsize=8)
    axes.set(xlabel="seconds", ylabel="tokens per second", xlim=(0, rows[0]["phases"][-1]["end"]), ylim=(0, None))
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
