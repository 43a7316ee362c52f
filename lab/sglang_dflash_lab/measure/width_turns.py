"""Compare fixed widths with adaptive ones in one server: ``python -m sglang_dflash_lab.measure.width_turns``.

A shared machine changes its speed from one run to the next by more than the arms differ. Here the arms take turns
within a second, so that all of them meet the same requests and the same moods of the machine. What is compared is
decoding alone: tokens over the time of decode steps that no prefill interrupted. A turn's first steps are left out,
because they pay for the last turn (tokens that wait to be injected).

A cell runs for ``--seconds``, and longer with many users, whose steps take longer; cells that are in the file are not
measured again.
"""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from math import exp, log
from pathlib import Path
from random import Random
from statistics import mean, quantiles
from typing import Annotated, Any

import typer

from sglang_dflash.diagnose.client import WORKER_KEY, Client
from sglang_dflash.diagnose.tables import Table
from sglang_dflash.user_errors import user_errors
from sglang_dflash_lab.bench.modes import Mode
from sglang_dflash_lab.bench.options import Options
from sglang_dflash_lab.bench.provenance import describe_hardware, hardware
from sglang_dflash_lab.bench.results import append_lines
from sglang_dflash_lab.bench.runner import internal_state
from sglang_dflash_lab.bench.server import running
from sglang_dflash_lab.bench.settings import configure
from sglang_dflash_lab.measure.width_arms import ADAPTIVE, ROOT, WIDEST
from sglang_dflash_lab.measure.width_load import OWN, WILD, Tokens, ask, finish, now, prompts, read_rows

FIXED, OWN_POLICY = ("1", "2", "4", "8", "16"), "own"  # arms of the plugin
TURN, LEFT_OUT = 12, 2  # steps of a turn, and of them those that pay for the last one
OF_BEST, OF_ONE_BLOCK = 0.97, 1.10
Turn = tuple[str, float, float]  # arm, tokens, milliseconds


@dataclass(frozen=True)
class Cell:
    """Who asks what: ``concurrency`` users, each of whom asks for the next answer as soon as the last one has come."""

    pair: str
    drafter: str
    task: str
    concurrency: int


async def drive(client: Client, asked: Sequence[list[int]], users: int, seconds: float, most: int) -> None:
    waiting, end, tokens = cycle(asked), now() + seconds, Tokens()

    async def user(number: int) -> None:
        length = max(1, most * (number + 1) // users)  # the first answer: users must not stay in step
        while now() < end:
            await ask(client, next(waiting), length, tokens)
            length = most

    tasks = [asyncio.create_task(user(number)) for number in range(users)]
    await asyncio.wait(tasks, timeout=seconds)
    await finish(client, tasks)


async def steps_so_far(client: Client) -> int:
    by_width: dict[str, int] = (await internal_state(client))[WORKER_KEY]["steps_by_width"]
    return sum(by_width.values())


async def measure_drafter(pair: str, drafter: str, todo: list[Cell], seconds: float, most: int, out: Path) -> None:
    """All missing cells of a pair and a drafter, on one server."""
    folder = out / f"{pair}-{drafter}"
    folder.mkdir(parents=True, exist_ok=True)
    turns, steps = folder / "turns", folder / "turns.steps"
    mode = Mode.parse(f"{ADAPTIVE}:{WIDEST}")
    users = max(cell.concurrency for cell in todo)
    launch = configure(Options(pair=pair, drafter=drafter, modes=mode.label, concurrency=str(users))).launch(mode)
    plugin = {
        "PYTHONPATH": str(ROOT / "tests/plugin"),
        "SGLANG_DFLASH_TEST_PLUGIN": "width_turns",
        "SGLANG_DFLASH_TEST_TURNS_FILE": str(turns.resolve()),
    }
    launch = replace(launch, env=(*launch.env, *plugin.items()))
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(
            Client(await stack.enter_async_context(running(launch, folder / "log")))
        )
        known = {task: await prompts(client, task) for task in dict.fromkeys(cell.task for cell in todo)}
        for cell in todo:
            before = await steps_so_far(client)
            Random(0).shuffle(known[cell.task])
            await drive(client, known[cell.task], cell.concurrency, seconds * (1 + cell.concurrency / 16), most)
            after = await steps_so_far(client)
            found = list(whole_turns(read_rows(steps)[before:after], turns.read_text().split()[before:after], cell))
            append_lines(out / "turns.jsonl", [{**asdict(cell), "turns": found}])
            typer.echo(f"{cell}: {len(found)} turns")


def whole_turns(steps: Sequence[Mapping[str, Any]], arms: Sequence[str], cell: Cell) -> Iterator[Turn]:
    """Tokens and milliseconds of each turn, of steps with all users in the batch."""
    start = 0
    while start < len(steps):
        end = start
        while end < len(steps) and arms[end] == arms[start]:
            end += 1
        counted = [step for step in steps[start + LEFT_OUT : end] if step["ms"] and step["users"] == cell.concurrency]
        if counted:
            yield arms[start], sum(sum(step["accept"]) for step in counted), sum(step["ms"] for step in counted)
        start = end


def speeds(turns: Sequence[Turn]) -> dict[str, float]:
    """Tokens per second of each arm."""
    tokens: dict[str, float] = defaultdict(float)
    milliseconds: dict[str, float] = defaultdict(float)
    for arm, count, ms in turns:
        tokens[arm] += count
        milliseconds[arm] += ms
    return {arm: 1000 * tokens[arm] / milliseconds[arm] for arm in tokens}


def over_best(turns: Sequence[Turn]) -> float:
    found = speeds(turns)
    return found[OWN_POLICY] / max(speed for arm, speed in found.items() if arm != OWN_POLICY)


def over_chosen(turns: Sequence[Turn]) -> float:
    """Over the arm that is the best in every other turn, judged by the rest, and the other way round: geometric mean.

    The best of several noisy arms is the one that was luckiest, too: judged by turns that did not choose it, it is not.
    """
    halves: tuple[list[Turn], list[Turn]] = ([], [])
    for arm in dict.fromkeys(arm for arm, *_ in turns):
        own = [turn for turn in turns if turn[0] == arm]
        for number, half in enumerate(halves):
            half += own[number::2] or own
    ratios = []
    for chosen_by, judged_by in (halves, halves[::-1]):
        found, judged = speeds(chosen_by), speeds(judged_by)
        best = max((arm for arm in found if arm != OWN_POLICY), key=found.__getitem__)
        ratios.append(judged[OWN_POLICY] / judged[best])
    return (ratios[0] * ratios[1]) ** 0.5


def interval(turns: Sequence[Turn], draws: int = 400) -> tuple[float, float]:
    """90 % of the resampled ratios to the arm that is best in all turns: each arm's turns drawn with replacement."""
    rng, by_arm = Random(0), defaultdict(list)
    for turn in turns:
        by_arm[turn[0]].append(turn)
    found = speeds(turns)
    best = max((arm for arm in found if arm != OWN_POLICY), key=found.__getitem__)
    ratios = []
    for _ in range(draws):
        drawn = speeds([t for arm in (best, OWN_POLICY) for t in rng.choices(by_arm[arm], k=len(by_arm[arm]))])
        ratios.append(drawn[OWN_POLICY] / drawn[best])
    cuts = quantiles(ratios, n=20)
    return cuts[0], cuts[-1]


def report(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The table, then what the adaptive width promises."""
    lines, ratios, unlucky, below = [], [], [], []
    gains: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        turns = [(arm, tokens, ms) for arm, tokens, ms in row["turns"]]
        name = [row[key] for key in Cell.__annotations__]
        if {arm for arm, *_ in turns} < {*FIXED, OWN_POLICY}:
            yield f"too short: {' '.join(map(str, name))}"
            continue
        found, ratio, (low, high) = speeds(turns), over_best(turns), interval(turns)
        ratios.append(ratio)
        unlucky.append(over_chosen(turns))
        if high < OF_BEST:
            below.append(" ".join(map(str, name)))
        for arm in FIXED[1:]:
            gains[arm].append(found[OWN_POLICY] / found[arm])
        cells = [f"{found[arm]:.0f}" for arm in (*FIXED, OWN_POLICY)]
        over_plain = found[OWN_POLICY] / found["1"]
        lines.append([*map(str, name), *cells, f"{ratio:.2f} [{low:.2f}, {high:.2f}]", f"{over_plain:.2f}"])
    if not lines:
        return
    columns = [*Cell.__annotations__, *FIXED, "adaptive", "over best [90 %]", "over width 1"]
    yield Table("", "", columns, lines).markdown()
    yield ""
    enough = sum(ratio >= OF_BEST for ratio in ratios)
    yield f"adaptive over the best width: mean {mean(ratios):.3f}, {enough} of {len(ratios)} cells at {OF_BEST} or more"
    chosen = exp(mean(map(log, unlucky)))
    yield f"over the width that is best in the other half of the turns, geometric mean: {chosen:.3f}"
    yield f"surely below it: {', '.join(below) or 'none'}"
    block, gain = min(((arm, exp(mean(map(log, found)))) for arm, found in gains.items()), key=lambda pair: pair[1])
    yield f"over the best single block ({block}), geometric mean: {gain:.2f}, promised {OF_ONE_BLOCK}"


def main(
    out: Annotated[Path, typer.Option(help="Folder of turns.jsonl; the same command resumes.")],
    pair: str = "tiny-hybrid",
    drafters: str = "good,noisy,weak,mismatched",
    tasks: str = f"{OWN},{WILD}",
    concurrency: str = "1,2,4,8,16,32",
    seconds: Annotated[float, typer.Option(help="Of a cell, and again for every 16 users.")] = 30.0,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 128,
    only_report: Annotated[bool, typer.Option("--report", help="Measure nothing; print the table.")] = False,
) -> None:
    """Measure what is missing, then print the table."""
    file = out / "turns.jsonl"
    with user_errors():
        for drafter in () if only_report else drafters.split(","):
            done = [Cell(*(row[key] for key in Cell.__annotations__)) for row in read_rows(file)]
            cells = [Cell(pair, drafter, task, int(c)) for task in tasks.split(",") for c in concurrency.split(",")]
            if todo := [cell for cell in cells if cell not in done]:
                asyncio.run(measure_drafter(pair, drafter, todo, seconds, max_tokens, out))
        typer.echo(describe_hardware(hardware()))
        typer.echo("\n".join(report(read_rows(file))))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    typer.run(main)
