"""Every width over minutes in which task and load change: ``python -m sglang_dflash_lab.measure.width_traffic``.

One seeded schedule for all arms: prompts that the drafter knows (one of the pairs' own tasks) in turn with prompts that
it does not (``wild``), each with another number of users. Each phase is run on all arms, one after the other, before
the next phase: so a shared machine's moods fall on all of them. Our widths share a server, in which each has a policy
of its own; the adaptive one learns from its own steps alone, and remembers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Annotated, Any, TypeVar

import typer

from sglang_dflash.diagnose.client import Client
from sglang_dflash.diagnose.tables import Table
from sglang_dflash.user_errors import user_errors
from sglang_dflash_lab.bench.provenance import describe_hardware, hardware
from sglang_dflash_lab.bench.results import append_lines
from sglang_dflash_lab.bench.tasks.offline import TASKS
from sglang_dflash_lab.measure.width_arms import ADAPTIVE, FIXED, PLAIN, Arms
from sglang_dflash_lab.measure.width_load import WILD, Tokens, ask, finish, now, prompts, read_rows

BINS = 10  # of a phase
Value = TypeVar("Value")


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


def schedule(count: int, seconds: float, loads: Sequence[int], seed: int) -> list[Phase]:
    """``count`` phases of ``seconds`` each: known and unknown prompts in turn, both at every load equally often."""
    rng = Random(seed)
    known, users, users_wild = _shuffled(rng, TASKS), _shuffled(rng, loads), _shuffled(rng, loads)
    turns = [(WILD, next(users_wild)) if number % 2 else (next(known), next(users)) for number in range(count)]
    return [Phase(task, load, n * seconds, (n + 1) * seconds) for n, (task, load) in enumerate(turns)]


def _shuffled(rng: Random, values: Sequence[Value]) -> Iterator[Value]:
    """All of them in a random order, again and again."""
    while True:
        yield from rng.sample(values, len(values))


async def run(client: Client, phase: Phase, waiting: Mapping[str, Iterator[list[int]]], most: int) -> Tokens:
    """One phase on one arm; the tokens' times are seconds since it began."""
    began = now()
    tokens, end = Tokens(began), began + phase.seconds

    async def user() -> None:
        while now() < end:
            await ask(client, next(waiting[phase.task]), most, tokens)

    users = [asyncio.create_task(user()) for _ in range(phase.users)]
    await asyncio.wait(users, timeout=phase.seconds, return_when=asyncio.FIRST_EXCEPTION)
    await finish(client, users)
    return tokens


async def measure(
    pair: str, drafter: str, arms: Sequence[str], phases: Sequence[Phase], most: int, out: Path
) -> list[dict[str, Any]]:
    """A row per arm: its tokens, and tokens per second in each bin."""
    async with Arms(pair, drafter, arms, max(phase.users for phase in phases), out) as servers:
        await servers.start(typer.echo)
        asked = {task: await prompts(servers.choose(arms[0]), task) for task in {phase.task for phase in phases}}
        waiting = {arm: {task: cycle(ids) for task, ids in asked.items()} for arm in arms}
        rows: dict[str, dict[str, Any]] = {
            arm: {"arm": arm, "tokens": 0.0, "bin_s": phases[0].seconds / BINS, "speeds": []} for arm in arms
        }
        for number, phase in enumerate(phases):
            first = number % len(arms)
            for arm in (*arms[first:], *arms[:first]):
                tokens = await run(servers.choose(arm), phase, waiting[arm], most)
                row, bin_s = rows[arm], phase.seconds / BINS
                row["tokens"] += tokens.between(0, phase.seconds)
                row["speeds"] += [round(tokens.between(n * bin_s, (n + 1) * bin_s) / bin_s, 1) for n in range(BINS)]
                typer.echo(f"{phase} {arm}: {tokens.between(0, phase.seconds):.0f} tokens")
    return [{**row, "phases": [asdict(phase) for phase in phases]} for row in rows.values()]


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


def main(
    out: Annotated[Path, typer.Option(help="Folder of traffic.jsonl and traffic.png.")],
    pair: str = "tiny-hybrid",
    drafter: str = "noisy",
    arms: str = ",".join((PLAIN, *FIXED, ADAPTIVE)),
    phases: Annotated[int, typer.Option(help="How many; twice the loads have all of them.")] = 12,
    seconds: Annotated[float, typer.Option(help="Of a phase.")] = 30.0,
    loads: Annotated[str, typer.Option(help="Users in a phase, in an order that the seed draws.")] = "1,8,32",
    seed: int = 0,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 128,
    only_report: Annotated[bool, typer.Option("--report", help="Measure nothing; print the table.")] = False,
) -> None:
    """Measure; print the table and draw the plot."""
    out.mkdir(parents=True, exist_ok=True)
    file, plan = out / "traffic.jsonl", schedule(phases, seconds, [int(load) for load in loads.split(",")], seed)
    with user_errors():
        if not only_report:
            file.unlink(missing_ok=True)
            append_lines(file, asyncio.run(measure(pair, drafter, arms.split(","), plan, max_tokens, out)))
    rows = read_rows(file)
    typer.echo(describe_hardware(hardware()))
    typer.echo("\n".join(report(rows)))
    draw(rows, out / "traffic.png")


if __name__ == "__main__":
    typer.run(main)
