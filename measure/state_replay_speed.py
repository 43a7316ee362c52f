"""Recurrent states replayed beside states kept, on this machine: ``python -m measure.state_replay_speed --out FOLDER``.

Two servers of one pair, up at once. They answer the same prompts in turn, and the order turns around in every repeat.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from measure.width_load import OWN, prompts
from measure.width_table import Cell, measure
from sglang_dflash.bench.client import Client
from sglang_dflash.bench.modes import Mode
from sglang_dflash.bench.options import Options
from sglang_dflash.bench.provenance import describe_hardware, hardware
from sglang_dflash.bench.server import running
from sglang_dflash.bench.settings import configure
from sglang_dflash.bench.tables import Table
from sglang_dflash.states.choice import SWITCH
from sglang_dflash.user_errors import user_errors

KEPT, REPLAYED = "kept", "replayed"
Speeds = dict[str, list[float]]


async def compare(
    pair: str, mode: Mode, loads: list[int], repeats: int, out: Path
) -> dict[int, dict[str, list[float]]]:
    """Tokens per second by users and way, one number a repeat."""
    out.mkdir(parents=True, exist_ok=True)
    settings = configure(Options(pair=pair, modes=mode.label, concurrency=str(max(loads))))
    launch = settings.launch(mode)
    async with AsyncExitStack() as servers:
        clients = {}
        for way, switch in ((KEPT, "0"), (REPLAYED, "1")):
            started = running(replace(launch, env=(*launch.env, (SWITCH, switch))), out / f"{way}.log")
            clients[way] = await servers.enter_async_context(Client(await servers.enter_async_context(started)))
        known = await prompts(clients[KEPT], OWN)
        found: dict[int, Speeds] = {load: {KEPT: [], REPLAYED: []} for load in loads}
        for repeat in range(repeats):
            for load in loads:
                cell = Cell(pair, "good", OWN, load)
                asked = list(islice(cycle(known), cell.answers))
                for way in list(clients)[:: -1 if repeat % 2 else 1]:
                    run = await measure(clients[way], asked, cell, 128)
                    found[load][way].append(run["tokens"] / run["seconds"])
    return found


def main(
    out: Annotated[Path, typer.Option(help="Folder of the servers' logs.")],
    pair: str = "tiny-hybrid",
    mode: str = "dflash:16",
    concurrency: str = "1,8",
    repeats: int = 5,
) -> None:
    """Print tokens per second both ways, and the ratio in each repeat: median and range."""
    with user_errors():
        loads = [int(load) for load in concurrency.split(",")]
        found = asyncio.run(compare(pair, Mode.parse(mode), loads, repeats, out))
    typer.echo(describe_hardware(hardware()))
    rows = []
    for load, ways in found.items():
        ratios = [after / before for before, after in zip(ways[KEPT], ways[REPLAYED], strict=True)]
        spread = f"{median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"
        rows.append([str(load), f"{median(ways[KEPT]):.0f}", f"{median(ways[REPLAYED]):.0f}", spread])
    typer.echo(Table("", "", ["concurrency", KEPT, REPLAYED, "replayed over kept"], rows).markdown())


if __name__ == "__main__":
    typer.run(main)
