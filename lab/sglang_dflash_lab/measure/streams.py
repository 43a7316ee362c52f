"""CPU time of a streamed token outside the scheduler: ``python -m sglang_dflash_lab.measure.streams``.

Arms: plain decoding; DFLASH, whose chats stay whole without a parser and are cut into tokens with one.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import httpx
import psutil
import typer

from sglang_dflash_lab.bench.arms import Arm, find_pair
from sglang_dflash_lab.bench.provenance import describe_hardware, hardware
from sglang_dflash_lab.bench.server import Launch, running
from sglang_dflash_lab.tables import Table

STREAMS, TOKENS = 16, 200
PARSER = ("--reasoning-parser", "qwen3")
ARMS = {
    "plain decoding": ("ar", PARSER),
    "DFLASH, whole chunks": ("dflash:16", ()),
    "DFLASH, cut chunks": ("dflash:16", PARSER),
}
COLUMNS = ["arm", "events per 1,000 tokens", "tokenizer, CPU us per token", "detokenizer", "events per CPU second"]


def processes(url: str) -> dict[str, psutil.Process]:
    listening = [each for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    [server] = {each.pid for each in listening if getattr(each.laddr, "port", None) == httpx.URL(url).port}
    tokenizer = psutil.Process(server)
    [detokenizer] = [each for each in tokenizer.children(recursive=True) if "detokenizer" in "".join(each.cmdline())]
    return {"tokenizer": tokenizer, "detokenizer": detokenizer}


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def stream(client: httpx.AsyncClient, url: str, n: int) -> tuple[int, int]:
    """Return the events and tokens of one chat."""
    events = tokens = 0
    question = f"Tom has {n} apples and buys {n + 4} more. How many apples does Tom have now? Count them."
    body: dict[str, Any] = {
        "model": "m",
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
        async for line in response.aiter_lines():
            events += line.startswith("data: {")
            if '"completion_tokens":' in line:
                tokens = int(line.rpartition('"completion_tokens":')[2].partition(",")[0].strip("} "))
    return events, tokens


async def load(url: str) -> tuple[int, int]:
    async with httpx.AsyncClient(timeout=600) as client:
        found = await asyncio.gather(*(stream(client, url, n) for n in range(STREAMS)))
    events, tokens = map(sum, zip(*found, strict=True))
    return events, tokens


def rows(repeats: int) -> Iterator[list[str]]:
    pair = find_pair("tiny-hybrid", None, None)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        flags = ("--model-path", pair.target, "--dtype", "float32", "--max-running-requests", str(STREAMS))
        servers: dict[str, str] = {}
        for name, (arm, more) in ARMS.items():
            launch = Launch((*flags, *Arm.parse(arm).server_args(pair), *more))
            servers[name] = stack.enter_context(running(launch, folder / f"{len(servers)}.log"))
        found: dict[str, list[list[float]]] = {name: [] for name in ARMS}
        for repeat in range(repeats + 1):
            for name, url in servers.items():
                of = processes(url)
                before = {each: cpu_seconds(process) for each, process in of.items()}
                events, tokens = asyncio.run(load(url))
                spent = [cpu_seconds(of[each]) - before[each] for each in ("tokenizer", "detokenizer")]
                if repeat:  # the first warms up
                    found[name].append(
                        [1000 * events / tokens, *(1e6 * each / tokens for each in spent), events / spent[0]]
                    )
    for name, measured in found.items():
        yield [
            name,
            *(
                f"{statistics.median(each):,.0f} [{min(each):,.0f}, {max(each):,.0f}]"
                for each in zip(*measured, strict=True)
            ),
        ]


def main(repeats: Annotated[int, typer.Option(help="Measured runs of each arm.")] = 5) -> None:
    """Print medians [range] of each arm: 16 streams of 200 tokens at once."""
    typer.echo(describe_hardware(hardware()))
    typer.echo(Table("", "", COLUMNS, list(rows(repeats))).markdown())


if __name__ == "__main__":
    typer.run(main)
