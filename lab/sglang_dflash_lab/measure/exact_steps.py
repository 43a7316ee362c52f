"""What exact mode costs on the CPU platform: ``python -m sglang_dflash_lab.measure.exact_steps``.

Plain decoding and a fixed block, each in bfloat16 with and without ``--enable-deterministic-inference``. Both servers
of a mode run, and take turns. A step's time is the stages' of ``SGLANG_DFLASH_STAGE_TIMES=1``, over its steps.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import httpx
import typer

from sglang_dflash.plan.settings import DETERMINISTIC_FLAG
from sglang_dflash_lab.bench.provenance import describe_hardware, hardware
from sglang_dflash_lab.bench.server import running
from sglang_dflash_lab.measure import launch, token_ids
from sglang_dflash_lab.pairs.corpus import TASKS, prompts
from sglang_dflash_lab.tables import Table

MODES = {"plain decoding": "ar", "block 16": "dflash:16+SGLANG_DFLASH_STAGE_TIMES=1"}
FLAGS: dict[str, tuple[str, ...]] = {"default": (), "deterministic": (DETERMINISTIC_FLAG,)}
STAGES = ("draft", "verify", "accept", "commit", "inject")
COLUMNS = ["mode", "flags", "tokens/s", "range", "accept length", *(f"{stage}, ms" for stage in STAGES)]


def stages(http: httpx.Client) -> tuple[int, dict[str, float]]:
    """Return the steps so far, and seconds by stage; nothing for plain decoding."""
    info: dict[str, Any] = http.get("/server_info").json()["internal_states"][0].get("sglang_dflash", {})
    return sum(info.get("steps_by_width", {}).values()), info.get("stage_seconds", {})


def ask(http: httpx.Client, inputs: list[list[int]], new_tokens: int) -> tuple[float, float]:
    """Return tokens per second and per block of one request for each input, all at once."""

    def one(ids: list[int]) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        reply = http.post("/generate", json={"input_ids": ids, "sampling_params": sampling})
        meta: dict[str, Any] = reply.raise_for_status().json()["meta_info"]
        return meta

    start = time.perf_counter()
    with ThreadPoolExecutor(len(inputs)) as pool:
        metas = list(pool.map(one, inputs))
    tokens, blocks = len(inputs) * new_tokens, sum(meta.get("spec_verify_ct", 0) for meta in metas)
    return tokens / (time.perf_counter() - start), (tokens - len(inputs)) / blocks if blocks else 1.0


def measure(pair: str, mode: str, requests: int, new_tokens: int, repeats: int, folder: Path) -> list[list[str]]:
    asked = [prompt for task in TASKS for prompt in prompts(task, n=-(-requests // len(TASKS)))][:requests]
    inputs = token_ids(pair, asked)
    speeds: dict[str, list[float]] = {name: [] for name in FLAGS}
    lengths: dict[str, float] = {}
    before: dict[str, tuple[int, dict[str, float]]] = {}
    clients: dict[str, httpx.Client] = {}
    with ExitStack() as stack:
        for name, flags in FLAGS.items():
            server = launch(pair, MODES[mode], requests, "--dtype", "bfloat16", *flags)
            url = stack.enter_context(running(server, folder / f"{name}.log"))
            clients[name] = stack.enter_context(httpx.Client(base_url=url, timeout=3600, trust_env=False))
            ask(clients[name], inputs, new_tokens)  # warm
            before[name] = stages(clients[name])
        for _ in range(repeats):
            for name, http in clients.items():
                speed, lengths[name] = ask(http, inputs, new_tokens)
                speeds[name].append(speed)
        rows = []
        for name, http in clients.items():
            (steps, seconds), (first, earlier) = stages(http), before[name]
            times = [1000 * (seconds[each] - earlier[each]) / (steps - first) for each in STAGES if each in seconds]
            found = speeds[name]
            shown = [f"{median(found):.0f}", f"{min(found):.0f} to {max(found):.0f}", f"{lengths[name]:.2f}"]
            rows.append([mode, name, *shown, *(f"{each:.1f}" for each in times), *["–"] * (len(STAGES) - len(times))])
    return rows


def main(
    pair: str = "tiny-hybrid",
    requests: Annotated[int, typer.Option(help="At once.")] = 8,
    new_tokens: int = 96,
    repeats: Annotated[int, typer.Option(help="Rounds of each server, in turn.")] = 5,
) -> None:
    """Print the table."""
    with TemporaryDirectory() as folder:
        rows = [row for mode in MODES for row in measure(pair, mode, requests, new_tokens, repeats, Path(folder))]
    typer.echo(describe_hardware(hardware()))
    typer.echo(Table("", "", COLUMNS, rows).markdown())


if __name__ == "__main__":
    typer.run(main)
