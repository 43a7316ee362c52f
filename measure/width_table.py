"""Every width beside the adaptive one, in every cell: ``python -m measure.width_table --out FOLDER``; resumes.

A cell is a pair, a drafter, a task and a number of users, each of whom asks for the next answer as soon as the last one
has come. All arms answer the same prompts, in alternating order. A user's first answer is cut short, each at another
length, so that the users do not stay in step. Counting begins when each user has had one on average, and ends when a
user finds no prompt left: the batch is full all the while. Answers of the pairs' own tasks end by themselves; elsewhere
a tiny target may loop, so ``--max-tokens`` ends most of them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated, Any

import typer

from measure.width_arms import ARMS, Arms, parse_arms
from measure.width_criteria import report
from measure.width_load import OWN, WILD, Tokens, ask, finish, now, prompts
from sglang_dflash.bench.client import Client
from sglang_dflash.bench.provenance import describe_hardware, hardware
from sglang_dflash.bench.results import append_lines
from sglang_dflash.bench.runner import WORKER_KEY, internal_state
from sglang_dflash.user_errors import user_errors


@dataclass(frozen=True)
class Cell:
    """Who asks what: see the module."""

    pair: str
    drafter: str
    task: str
    concurrency: int

    @property
    def warm_up(self) -> int:
        """Answers before the clock starts."""
        return max(self.concurrency, 3)

    @property
    def answers(self) -> int:
        """All answers: seconds of plain decoding, and at least two of every user; the pairs' own are short and fast."""
        counted = max(2 * self.concurrency, min(2 + 4 * self.concurrency, 40))
        return self.warm_up + counted * (2 if self.task == OWN else 1)


async def measure(client: Client, asked: Sequence[list[int]], cell: Cell, max_tokens: int) -> dict[str, Any]:
    """One run of a cell: tokens counted, and in how many seconds; for our worker also its steps by width."""
    tokens, waiting = Tokens(), iter(asked)
    begin = end = answered = 0.0
    steps_before = await _steps(client)

    async def user(number: int) -> None:
        nonlocal begin, end, answered
        most = max(1, max_tokens * (number + 1) // cell.concurrency)
        for input_ids in waiting:
            await ask(client, input_ids, most, tokens)
            most = max_tokens
            answered += 1
            if answered == cell.warm_up:
                begin = now()
        end = end or now()

    users = [asyncio.create_task(user(number)) for number in range(cell.concurrency)]
    await asyncio.wait(users, return_when=asyncio.FIRST_COMPLETED)
    await finish(client, users)
    steps = {width: count - steps_before.get(width, 0) for width, count in (await _steps(client)).items()}
    return {
        "tokens": round(tokens.between(begin, end), 1),
        "seconds": round(end - begin, 3),
        "steps": {width: count for width, count in steps.items() if count},
    }


async def _steps(client: Client) -> dict[str, int]:
    steps: dict[str, int] = (await internal_state(client)).get(WORKER_KEY, {}).get("steps_by_width", {})
    return steps


def missing(cells: Iterable[Cell], arms: Sequence[str], repeats: int, rows: Sequence[dict[str, Any]]) -> Iterator[Any]:
    """(cell, repeat, arms that no row has yet), the arms' order reversed in every other repeat."""
    done = {(Cell(**{name: row[name] for name in Cell.__annotations__}), row["repeat"], row["arm"]) for row in rows}
    for cell in cells:
        for repeat in range(repeats):
            left = [arm for arm in arms if (cell, repeat, arm) not in done]
            if left:
                yield cell, repeat, left[:: -1 if repeat % 2 else 1]


async def measure_pair(pair: str, drafter: str, todo: list[Any], max_tokens: int, out: Path) -> None:
    """All missing runs of a pair and a drafter, on one set of servers."""
    needed = list(dict.fromkeys(arm for _, _, arms in todo for arm in arms))
    most = max(cell.concurrency for cell, _, _ in todo)
    folder = out / f"{pair}-{drafter}"
    folder.mkdir(parents=True, exist_ok=True)
    async with Arms(pair, drafter, needed, most, folder) as servers:
        await servers.start(typer.echo)
        client = servers.choose(needed[0])
        known = {task: await prompts(client, task) for task in dict.fromkeys(cell.task for cell, _, _ in todo)}
        for cell, repeat, arms in todo:
            asked = list(islice(cycle(known[cell.task]), repeat * cell.answers, (repeat + 1) * cell.answers))
            for arm in arms:
                run = await measure(servers.choose(arm), asked, cell, max_tokens)
                append_lines(out / "rows.jsonl", [{**asdict(cell), "arm": arm, "repeat": repeat, **run}])
                typer.echo(f"{cell} {arm} {repeat}: {run['tokens'] / run['seconds']:.1f} tok/s, {run['seconds']} s")


def main(
    out: Annotated[Path, typer.Option(help="Folder of rows.jsonl; the same command resumes.")],
    pair: str = "tiny-hybrid",
    drafters: str = "good,noisy,weak,mismatched",
    tasks: str = f"{OWN},{WILD}",
    concurrency: str = "1,2,4,8,16,32",
    arms: Annotated[str, typer.Option(help="plain, adaptive, a width, or builtin:BLOCK; commas between.")] = ",".join(
        ARMS
    ),
    repeats: int = 2,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 128,
    only_report: Annotated[bool, typer.Option("--report", help="Measure nothing; print the table.")] = False,
) -> None:
    """Measure what is missing, then print the table and whether the adaptive width holds what it promises."""
    rows_file = out / "rows.jsonl"
    with user_errors():
        chosen = parse_arms(arms)
        for drafter in () if only_report else drafters.split(","):
            cells = [Cell(pair, drafter, task, int(c)) for task in tasks.split(",") for c in concurrency.split(",")]
            if todo := list(missing(cells, chosen, repeats, read_rows(rows_file))):
                asyncio.run(measure_pair(pair, drafter, todo, max_tokens, out))
        typer.echo(describe_hardware(hardware()))
        typer.echo("\n".join(report(read_rows(rows_file))))


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Finished runs; none if the file is not there yet."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


if __name__ == "__main__":
    typer.run(main)
