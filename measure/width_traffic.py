"""Traffic that changes: every width over minutes in which task and load switch. ``python -m measure.width_traffic``.

One seeded schedule for all arms, one arm after the other: prompts that the drafter knows (one of the pairs' own tasks)
in turn with prompts that it does not (``wild``), each with another number of users. Users who are too many stop after
their answer; those who are to come begin at once. Resumes: an arm that is in the file is not measured again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Annotated, Any, TypeVar

import typer

from measure.width_arms import ADAPTIVE, FIXED, PLAIN, Arms, parse_arms
from measure.width_load import WILD, Tokens, ask, finish, now, prompts
from measure.width_traffic_report import Phase, draw, report
from sglang_dflash.bench.client import Client
from sglang_dflash.bench.files import append_lines
from sglang_dflash.bench.tasks.pair_tasks import TASKS
from sglang_dflash.user_errors import user_errors

Value = TypeVar("Value")


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


async def run(client: Client, phases: Sequence[Phase], asked: Mapping[str, list[list[int]]], most: int) -> Tokens:
    """The whole schedule on one arm; the tokens' times are seconds since it began."""
    began = now()
    tokens, waiting = Tokens(began), {task: cycle(ids) for task, ids in asked.items()}

    async def user(number: int) -> None:
        for phase in phases:
            while (left := began + phase.end - now()) > 0:
                if number < phase.users:
                    await ask(client, next(waiting[phase.task]), most, tokens)
                else:
                    await asyncio.sleep(left)

    users = [asyncio.create_task(user(number)) for number in range(max(phase.users for phase in phases))]
    await asyncio.wait(users, timeout=phases[-1].end, return_when=asyncio.FIRST_EXCEPTION)
    await finish(client, users)
    return tokens


async def measure(
    pair: str, drafter: str, arms: Sequence[str], phases: Sequence[Phase], most: int, bin_s: float, out: Path
) -> None:
    """A line in ``traffic.jsonl`` per arm: tokens per second in each bin."""
    async with Arms(pair, drafter, arms, max(phase.users for phase in phases), out) as servers:
        await servers.start(typer.echo)
        asked = {task: await prompts(servers.choose(arms[0]), task) for task in {phase.task for phase in phases}}
        for arm in arms:
            tokens = await run(servers.choose(arm), phases, asked, most)
            starts = [number * bin_s for number in range(round(phases[-1].end / bin_s))]
            speeds = [round(tokens.between(start, start + bin_s) / bin_s, 1) for start in starts]
            row = {"arm": arm, "tokens": round(tokens.between(0, phases[-1].end)), "bin_s": bin_s, "speeds": speeds}
            append_lines(out / "traffic.jsonl", [{**row, "phases": [asdict(phase) for phase in phases]}])
            typer.echo(f"{arm}: {row['tokens']} tokens in {phases[-1].end:.0f} s")


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
) -> None:
    """Measure the arms that are missing; print the table and draw the plot."""
    out.mkdir(parents=True, exist_ok=True)
    file, plan = out / "traffic.jsonl", schedule(phases, seconds, [int(load) for load in loads.split(",")], seed)
    with user_errors():
        chosen = parse_arms(arms)
        done = [row["arm"] for row in read_rows(file, plan)]
        if left := [arm for arm in chosen if arm not in done]:
            asyncio.run(measure(pair, drafter, left, plan, max_tokens, seconds / 10, out))
        rows = read_rows(file, plan)
    typer.echo("\n".join(report(rows)))
    draw(rows, out / "traffic.png")


def read_rows(file: Path, plan: Sequence[Phase]) -> list[dict[str, Any]]:
    """Finished arms of this schedule."""
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [row for row in rows if row["phases"] == [asdict(phase) for phase in plan]]


if __name__ == "__main__":
    typer.run(main)
