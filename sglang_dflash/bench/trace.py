"""`bench trace`: which step committed how many tokens and how long it took, for later work on block widths.

Needs nothing of the server but its stream: SGLang sends one event per request and step, with the number of tokens so
far, so the differences are accept lengths and the gaps are step times as the client sees them. Works for any worker.
"""

from __future__ import annotations

import asyncio
import csv
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console

from sglang_dflash.bench import provenance, results, tasks
from sglang_dflash.bench.client import Client
from sglang_dflash.bench.modes import Mode
from sglang_dflash.bench.prompt_book import PromptBook
from sglang_dflash.bench.servers import Servers
from sglang_dflash.bench.settings import Settings
from sglang_dflash.bench.tables import Table, number

TRACES, COSTS = "traces.jsonl", "step_costs.csv"


@dataclass(frozen=True)
class Trace:
    """One request, step by step.

    Attributes:
        width: tokens verified per step; 1 without speculation.
        prompt_tokens: context length before the first step.
        committed: tokens that each step added, the bonus token included; the last step's may be cut by a stop.
        step_s: seconds between a step's event and the one before it.
        whole: whether every step had an event of its own: the counts equal the server's own number of steps. A client
            that falls behind gets several steps in one event.
    """

    mode: str
    task: str
    question: str
    concurrency: int
    width: int
    prompt_tokens: int
    committed: list[int]
    step_s: list[float]
    whole: bool


@dataclass(frozen=True)
class StepCost:
    """What a step costs at a width and a number of requests in flight: seconds, and tokens committed per request."""

    mode: str
    width: int
    concurrency: int
    steps: int
    median_s: float
    p90_s: float
    committed: float


def record(settings: Settings, console: Console) -> list[Trace]:
    """Trace every question once per mode and concurrency; written to `settings.out` with their provenance."""
    traces = asyncio.run(_record(settings, console))
    with (settings.out / COSTS).open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(StepCost.__dataclass_fields__))
        writer.writeheader()
        writer.writerows(asdict(cost) for cost in step_costs(traces))
    return traces


async def _record(settings: Settings, console: Console) -> list[Trace]:
    writer = results.Writer(settings.out)
    book = PromptBook(settings.out, settings.sampling.thinking)
    traces: list[Trace] = []
    with (settings.out / TRACES).open("w") as file:
        header = {"kind": "provenance", **provenance.collect(settings.describe())}
        file.write(json.dumps(header) + "\n")
        async with Servers(settings, writer, console.print) as servers:
            for mode in settings.modes:
                for concurrency in settings.concurrencies:
                    client = await servers.client(mode.label)
                    console.print(f"tracing {mode.label} at concurrency {concurrency}")
                    new = await _trace_arm(client, mode, concurrency, settings, book)
                    file.writelines(json.dumps({"kind": "trace", **asdict(trace)}) + "\n" for trace in new)
                    traces += new
    writer.close()
    return traces


async def _trace_arm(client: Client, mode: Mode, concurrency: int, settings: Settings, book: PromptBook) -> list[Trace]:
    asked = []
    for name in settings.tasks:
        for question in tasks.load(name, settings.num_prompts, seed=settings.seed, data_dir=settings.data_dir):
            asked.append((name, question.id, await book.input_ids(client, name, question, [])))
    await client.flush_cache()
    waiting, traces = iter(asked), []

    async def user() -> None:
        for name, question, input_ids in waiting:
            events = [event async for event in client.events(input_ids, settings.sampling)]
            traces.append(read_events(events, mode, name, question, concurrency))

    await asyncio.gather(*(user() for _ in range(concurrency)))
    return traces


def read_events(events: list[tuple[float, bytes]], mode: Mode, task: str, question: str, concurrency: int) -> Trace:
    """A request's trace from its stream; the first event is the prefill's token, each later one a step."""
    metas: list[dict[str, Any]] = [json.loads(payload)["meta_info"] for _, payload in events]
    counts = [meta["completion_tokens"] for meta in metas]
    arrived = [time for time, _ in events]
    committed = [after - before for before, after in zip(counts, counts[1:], strict=False)]
    steps = metas[-1].get("spec_verify_ct", counts[-1] - 1)
    return Trace(
        mode=mode.label,
        task=task,
        question=question,
        concurrency=concurrency,
        width=mode.block or 1,
        prompt_tokens=metas[0]["prompt_tokens"],
        committed=committed,
        step_s=[after - before for before, after in zip(arrived, arrived[1:], strict=False)],
        whole=len(committed) == steps,
    )


def step_costs(traces: Iterable[Trace]) -> list[StepCost]:
    """Median step time by mode and concurrency, over traces in which every step is seen."""
    groups: dict[tuple[str, int, int], list[Trace]] = {}
    for trace in traces:
        if trace.whole and trace.committed:
            groups.setdefault((trace.mode, trace.width, trace.concurrency), []).append(trace)
    costs = []
    for (mode, width, concurrency), members in groups.items():
        seconds = np.concatenate([trace.step_s for trace in members])
        committed = np.concatenate([trace.committed for trace in members])
        median, p90 = (float(v) for v in np.percentile(seconds, (50, 90)))
        costs.append(StepCost(mode, width, concurrency, len(seconds), median, p90, float(committed.mean())))
    return costs


def cost_table(traces: list[Trace]) -> Table:
    """The step costs, with the share of traces they were read from."""
    whole = sum(trace.whole for trace in traces)
    return Table(
        "Step costs",
        f"milliseconds between the events of a request, as the client sees them; "
        f"from {whole} of {len(traces)} traces, those in which every step had an event of its own",
        ["mode", "width", "c", "steps", "median ms", "p90 ms", "tokens per step"],
        [
            [
                cost.mode, str(cost.width), str(cost.concurrency), str(cost.steps),
                number(1000 * cost.median_s), number(1000 * cost.p90_s), number(cost.committed),
            ]
            for cost in step_costs(traces)
        ],
    )  # fmt: skip
