"""``bench profile``: a torch profiler trace of some decode steps, and where their time goes by stage.

SGLang writes the trace (``/start_profile``); our worker names its stages in it, so that ``dflash.draft``,
``.verify``, ``.accept``, ``.commit`` and ``.inject`` show as ranges in Perfetto or ``chrome://tracing``.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import shutil
from itertools import cycle
from pathlib import Path

from rich.console import Console

from sglang_dflash.bench.runner import closed_loop
from sglang_dflash.bench.servers import Prompt, Servers
from sglang_dflash.bench.settings import Settings
from sglang_dflash.bench.tables import Table
from sglang_dflash.errors import DFlashError

STAGES = ("draft", "verify", "accept", "commit", "inject")
FOLDER = "profile"
_WRITTEN_WITHIN_S = 120.0


def record(settings: Settings, steps: int, console: Console) -> Path:
    """Profile ``steps`` scheduler steps of the first mode under the first concurrency's load; -> the trace file.

    Raises:
        DFlashError: the server wrote no trace.
    """
    return asyncio.run(_record(settings, steps, console))


async def _record(settings: Settings, steps: int, console: Console) -> Path:
    folder = settings.out / FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    async with Servers(settings, console.print) as servers:
        client = await servers.client(settings.modes[0].label)
        prompts = await servers.prompts(client)

        async def ask(prompt: Prompt) -> None:
            await client.generate(prompt.input_ids, settings.sampling)

        await ask(prompts[0])
        # Ask until the server has profiled its steps and written them down.
        load = asyncio.create_task(closed_loop(cycle(prompts), settings.concurrencies[0], ask))
        try:
            # Without activities SGLang takes the CPU's and, if there is one, the GPU's.
            await client.start_profile({"output_dir": str(folder.resolve()), "num_steps": steps})
            return await _wait_for_trace(folder)
        finally:
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)


async def _wait_for_trace(folder: Path) -> Path:
    """The first complete trace: SGLang writes it while it goes on serving."""
    for _ in range(int(_WRITTEN_WITHIN_S * 2)):
        for path in sorted(folder.rglob("*.json.gz")):
            try:
                with gzip.open(path) as file:
                    json.load(file)
                return path
            except (EOFError, json.JSONDecodeError):
                continue  # still being written
        await asyncio.sleep(0.5)
    raise DFlashError(
        f"no trace in {folder} after {_WRITTEN_WITHIN_S:.0f} s",
        expected="a file *.trace.json.gz from the server's profiler",
        remedy="see the server's log; with --base-url the server must share this file system",
    )


def stage_table(trace: Path) -> Table:
    """Calls and times of the named stages on the host, in a trace file.

    Raises:
        DFlashError: it has none of them.
    """
    with gzip.open(trace) as file:
        events = json.load(file)["traceEvents"]
    rows = []
    for stage in STAGES:
        spent = [e["dur"] for e in events if e.get("name") == f"dflash.{stage}" and e.get("cat") == "user_annotation"]
        if spent:
            total = sum(spent)
            rows.append([stage, str(len(spent)), f"{total / 1000:.2f}", f"{total / len(spent) / 1000:.3f}"])
    if not rows:
        raise DFlashError(
            f"{trace} has no range dflash.draft, dflash.verify, …",
            expected="decode steps of our worker",
            remedy="profile a dflash mode, and more steps, so that decoding is among them",
        )
    caption = "host milliseconds inside each range; the profiler itself slows them down, so compare shares, not times"
    return Table("Stages in the trace", caption, ["stage", "calls", "ms", "ms per call"], rows)
