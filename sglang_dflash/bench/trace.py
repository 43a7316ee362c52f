"""``bench trace``: which step committed how many tokens and how long it took, for later work on block widths.

Needs nothing of the server but its stream: SGLang sends one event per request and step, with the number of tokens so
far, so the differences are accept lengths and the gaps are step times as the client sees them. Works for any worker.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from typing import Any

import numpy as np
from rich.console import Console

from sglang_dflash.bench import provenance
from sglang_dflash.bench.client import Client, Sampling
from sglang_dflash.bench.files import append_lines, write_csv
from sglang_dflash.bench.modes import Mode
from sglang_dflash.bench.runner import closed_loop
from sglang_dflash.bench.servers import Prompt, Servers
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
    """Trace every question once per mode and concurrency; written to ``settings.out`` with their provenance."""
    traces = asyncio.run(_record(settings, console))
    write_csv(settings.out / COSTS, StepCost, step_costs(traces))
    return traces


async def _record(settings: Settings, console: Console) -> list[Trace]:
    traces: list[Trace] = []
    path = settings.out / TRACES
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    append_lines(path, [{"kind": "provenance", **provenance.collect(settings.describe())}])
    async with Servers(settings, console.print) as servers:
        for mode, concurrency in product(settings.modes, settings.concurrencies):
            client = await servers.client(mode.label)
            console.print(f"tracing {mode.label} at concurrency {concurrency}")
            new = await _trace_arm(client, await servers.prompts(client), mode, concurrency, settings.sampling)
            append_lines(path, ({"kind": "trace", **asdict(trace)} for trace in new))
            traces += new
    return traces


async def _trace_arm(
    client: Client, prompts: list[Prompt], mode: Mode, concurrency: int, sampling: Sampling
) -> list[Trace]:
    traces = []

    async def ask(prompt: Prompt) -> None:
        events = [event async for event in client.events(prompt.input_ids, sampling)]
        traces.append(read_events(events, mode, prompt.task, prompt.question, concurrency))

    await client.flush_cache()
    await closed_loop(prompts, concurrency, ask)
    return traces


def read_events(events: list[tuple[float, bytes]], mode: Mode, task: str, question: str, concurrency: int) -> Trace:
    """A request's trace from its stream; the first event is the prefill's token, each later one a step."""
    metas: list[dict[str, Any]] = [json.loads(payload)["meta_info"] for _, payload in events]
    counts = [meta["completion_tokens"] for meta in metas]
    committed = [after - before for before, after in pairwise(counts)]
    return Trace(
        mode=mode.label,
        task=task,
        question=question,
        concurrency=concurrency,
        width=mode.block or 1,
        prompt_tokens=metas[0]["prompt_tokens"],
        committed=committed,
        step_s=[after - before for (before, _), (after, _) in pairwise(events)],
        whole=len(committed) == metas[-1].get("spec_verify_ct", counts[-1] - 1),
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
    rows = []
    for cost in step_costs(traces):
        figures = [number(value) for value in (1000 * cost.median_s, 1000 * cost.p90_s, cost.committed)]
        rows.append([cost.mode, str(cost.width), str(cost.concurrency), str(cost.steps), *figures])
    return Table(
        "Step costs",
        f"milliseconds between the events of a request, as the client sees them; "
        f"from {whole} of {len(traces)} traces, those in which every step had an event of its own",
        ["mode", "width", "c", "steps", "median ms", "p90 ms", "tokens per step"],
        rows,
    )
