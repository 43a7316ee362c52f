"""One replica's speed predicts several behind SGLang's router: ``python -m measure.replicas --out FOLDER``.

First one replica is asked with so many requests always in flight. Its rates are all that the queueing model
(`replicas_model`) gets. Then one, two and three replicas behind the router get Poisson streams, at shares of what full
replicas complete, and the table sets what the model says beside what was measured.

Replicas on one machine share its cores, so each is paced (the test plugin's mode ``paced``): a step takes at least
``--pace``, and what a step needs of the cores fits in. Rows that are in the file are not measured again.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer

from measure.replicas_load import Asker, Estimate, mean_in_flight
from measure.replicas_many import LEAST_LOADED, RANDOM
from measure.replicas_report import rates_of, report
from measure.replicas_servers import counters, paced, routed
from measure.width_load import OWN, prompts
from sglang_dflash.bench.client import Client
from sglang_dflash.bench.files import append_lines
from sglang_dflash.bench.provenance import describe_hardware, hardware
from sglang_dflash.bench.server import running
from sglang_dflash.user_errors import user_errors

QUEUE_SECONDS = "sglang:queue_time_seconds_sum"
QUEUED = "sglang:queue_time_seconds_count"


@dataclass(frozen=True)
class Plan:
    """What is measured, and on what; rows of another plan are not read."""

    pair: str
    block: int
    slots: int
    pace: str
    prompts: int
    max_tokens: int
    answers: int
    seconds: float
    warm_up: float


@dataclass(frozen=True)
class Cell:
    """A stream at a share of what ``replicas`` full ones complete."""

    policy: str
    replicas: int
    share: float


def cells(replicas: Sequence[int], shares: Sequence[float]) -> list[Cell]:
    """For a single replica the policy does not matter."""
    policies = [(n, policy) for n in replicas for policy in ((RANDOM, LEAST_LOADED) if n > 1 else (RANDOM,))]
    return [Cell(policy, n, share) for n, policy in policies for share in shares]


class Rows:
    """The file of a plan's rows, of kind ``rate`` and ``cell``."""

    def __init__(self, file: Path, plan: Plan) -> None:
        self._file, self._plan = file, asdict(plan)

    def add(self, kind: str, **row: Any) -> None:
        append_lines(self._file, [{"kind": kind, **row, "plan": self._plan}])

    def read(self, kind: str) -> list[dict[str, Any]]:
        rows = [json.loads(line) for line in self._file.read_text().splitlines()] if self._file.exists() else []
        return [row for row in rows if row["kind"] == kind and row["plan"] == self._plan]

    def rates_done(self) -> list[int]:
        return [row["users"] for row in self.read("rate")]

    def cells_done(self) -> list[Cell]:
        return [Cell(row["policy"], row["replicas"], row["share"]) for row in self.read("cell")]


async def measure(plan: Plan, rows: Rows, in_flight: Sequence[int], wanted: Sequence[Cell], out: Path) -> None:
    """The rows of these rates and cells, in this order."""
    launch = paced(plan.pair, plan.block, plan.slots, plan.pace)
    typer.echo(launch.describe())
    async with AsyncExitStack() as stack:
        count = max([1, *(cell.replicas for cell in wanted)])
        replicas = [await stack.enter_async_context(running(launch, out / f"replica-{n}.log")) for n in range(count)]
        async with Client(replicas[0]) as client:
            asked = (await prompts(client, OWN))[: plan.prompts]
        for replica in replicas:  # the same prefixes in every cache
            async with Asker(replica, asked, plan.max_tokens, Random(0)) as asker:
                await asker.in_flight(plan.slots, plan.prompts)
        for users in in_flight:
            async with Asker(replicas[0], asked, plan.max_tokens, Random(users)) as asker:
                rate = await asker.in_flight(users, max(plan.prompts, plan.answers * users))
            rows.add("rate", users=users, rate=rate.value, error=rate.error)
            typer.echo(f"{users} in flight: {rate.value:.3f} ± {rate.error:.3f} requests/s")
        rates = rates_of(rows.read("rate"))
        for cell in wanted:
            behind = replicas[: cell.replicas]
            async with routed(cell.policy, behind, out / f"router-{cell.policy}-{cell.replicas}.log") as router:
                row = await measure_cell(plan, cell, rates.most * cell.share * cell.replicas, router, behind, asked)
            rows.add("cell", **asdict(cell), **row)
            typer.echo(f"{cell}: {row['latency']:.3f} ± {row['error']:.3f} s")


async def measure_cell(
    plan: Plan, cell: Cell, arrivals: float, router: str, replicas: list[str], asked: list[list[int]]
) -> dict[str, Any]:
    """A Poisson stream through the router: seconds a request, and what the replicas' own series say of it."""
    rng = Random(f"{cell}")
    before = [await counters(replica) for replica in replicas]
    async with Asker(router, asked, plan.max_tokens, rng) as asker:
        requests = await asker.poisson(arrivals, plan.seconds, rng)
    after = [await counters(replica) for replica in replicas]
    pairs = zip(before, after, strict=True)
    grown = [{name: new[name] - old.get(name, 0.0) for name in (QUEUE_SECONDS, QUEUED)} for old, new in pairs]
    counted = [(sent, arrived) for sent, arrived in requests if sent >= plan.warm_up]
    latency = Estimate.of([arrived - sent for sent, arrived in counted])
    finished = sum(plan.warm_up <= arrived < plan.seconds for _, arrived in requests)
    return {
        "arrivals": arrivals,
        "requests": len(counted),
        "latency": latency.value,
        "error": latency.error,
        "in_flight": mean_in_flight(requests, plan.warm_up, plan.seconds),
        "completed": finished / (plan.seconds - plan.warm_up),
        "queue": sum(each[QUEUE_SECONDS] for each in grown) / len(requests),
        "by_replica": [round(each[QUEUED]) for each in grown],
    }


def main(
    out: Annotated[Path, typer.Option(help="Folder of replicas.jsonl and the logs; the same command resumes.")],
    pair: str = "tiny-dense",
    block: int = 8,
    slots: Annotated[int, typer.Option(help="Requests that a replica serves at once.")] = 8,
    pace: Annotated[
        str, typer.Option(help="Milliseconds: of a prefill, of a decode step, of each request in it.")
    ] = "20 60 8",
    prompts: Annotated[int, typer.Option(help="Different ones.")] = 16,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 48,
    in_flight: Annotated[str, typer.Option(help="How many, to measure one replica's rates.")] = "1,2,4,6,8,16",
    answers: Annotated[int, typer.Option(help="Counted of each in flight, and no fewer than the prompts.")] = 6,
    replicas: str = "1,2,3",
    shares: Annotated[str, typer.Option(help="Of what full replicas complete.")] = "0.5,0.8",
    seconds: Annotated[float, typer.Option(help="Of a stream.")] = 40.0,
    warm_up: Annotated[float, typer.Option(help="Of them, those that do not count.")] = 6.0,
    only_report: Annotated[bool, typer.Option("--report", help="Measure nothing; print the tables.")] = False,
) -> None:
    """Measure what is missing, then print the tables."""
    out.mkdir(parents=True, exist_ok=True)
    plan = Plan(pair, block, slots, pace, prompts, max_tokens, answers, seconds, warm_up)
    rows = Rows(out / "replicas.jsonl", plan)
    with user_errors():
        users = [n for n in map(int, in_flight.split(",")) if n not in rows.rates_done()]
        every = cells([*map(int, replicas.split(","))], [*map(float, shares.split(","))])
        wanted = [cell for cell in every if cell not in rows.cells_done()]
        if not only_report and (users or wanted):
            asyncio.run(measure(plan, rows, users, wanted, out))
    typer.echo(describe_hardware(hardware()))
    typer.echo("\n".join(report(rows.read("rate"), rows.read("cell"))))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    typer.run(main)
