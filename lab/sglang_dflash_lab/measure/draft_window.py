"""Measure a draft window by context length: ``python -m sglang_dflash_lab.measure.draft_window``.

One server per window, one request at a time, prompts of the pair's training tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import httpx
import typer

from sglang_dflash.check.diagnose.client import WORKER_KEY
from sglang_dflash_lab.bench.figures import number
from sglang_dflash_lab.bench.provenance import describe_hardware, hardware
from sglang_dflash_lab.bench.server import Launch, running
from sglang_dflash_lab.measure import launch, token_ids
from sglang_dflash_lab.pairs import NAMES
from sglang_dflash_lab.pairs.corpus import TASKS, prompts
from sglang_dflash_lab.tables import Table

NO_WINDOW = 0
MODE = "dflash:16"

# Window (0: none), prompt tokens, new tokens per verified block, bytes of the drafter's K/V pool; next turn's prompt
# tokens from the prefix cache and computed.
Row = tuple[int, int, float, int, float, float]


def conversations(pair: str, lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Return one prompt per length, in tokens."""
    tokens: list[int] = []
    number = 0
    while len(tokens) < max(lengths):
        for task in TASKS:
            [ids] = token_ids(pair, prompts(task, n=1, seed=seed * 1000 + number))
            number += 1
            tokens += ids
    return [tokens[-length:] for length in lengths]


def measure(server: Launch, window: int, inputs: Sequence[Sequence[list[int]]], new_tokens: int) -> list[Row]:
    """Return one row per inner list of ``inputs``, whose prompts have the same length."""
    rows = []
    with (
        TemporaryDirectory() as folder,
        running(server, Path(folder) / "server.log") as url,
        httpx.Client(base_url=url, timeout=3600, trust_env=False) as http,
    ):

        def generate(prompt: list[int], most: int) -> dict[str, Any]:
            sampling = {"temperature": 0, "max_new_tokens": most, "ignore_eos": most == 1}
            reply = http.post("/generate", json={"input_ids": prompt, "sampling_params": sampling})
            return dict(reply.raise_for_status().json())

        generate(inputs[0][0], new_tokens)  # warm-up
        for same_length in inputs:
            http.post("/flush_cache", params={"timeout": 30}).raise_for_status()
            first = [generate(prompt, new_tokens) for prompt in same_length]
            turns = [[*prompt, *answer["output_ids"]] for prompt, answer in zip(same_length, first, strict=True)]
            cached = fmean(generate(turn, 1)["meta_info"]["cached_tokens"] for turn in turns)
            accept = fmean(answer["meta_info"]["spec_accept_length"] for answer in first)
            state = http.get("/server_info").json()["internal_states"][0][WORKER_KEY]
            size = state["memory_bytes"]["draft_kv"]
            rows.append((window, len(same_length[0]), accept, size, cached, fmean(map(len, turns)) - cached))
    return rows


def table(rows: Sequence[Row], one_slot_per_token: int) -> Table:
    """Tabulate the rows; ``one_slot_per_token``: bytes of a drafter pool as large as the target's."""
    cells = []
    for window, context, accept, draft_kv, reused, recomputed in rows:
        sizes = [f"{size / 2**20:.1f} MiB" for size in (draft_kv, one_slot_per_token)]
        figures = [number(accept), *sizes, f"{draft_kv / one_slot_per_token:.1%}"]
        cells.append([str(window or "none"), str(context), *figures, number(reused, 0), number(recomputed, 0)])
    columns = ["window", "context", "accept length", "draft K/V", "one slot per token", "share"]
    return Table("Draft windows", "", [*columns, "next turn: reused", "recomputed"], cells)


def main(
    pair: Annotated[str, typer.Option(help=f"One of {', '.join(NAMES)}.")] = "tiny-hybrid",
    windows: Annotated[
        str, typer.Option(help="Window sizes in tokens; no window is always measured too.")
    ] = "16,64,512,2048",
    contexts: Annotated[str, typer.Option(help="Prompt lengths in tokens.")] = "512,1024,2048,4096,8000",
    number: Annotated[int, typer.Option("--prompts", help="Prompts per length.")] = 4,
    new_tokens: Annotated[int, typer.Option(help="Maximum tokens per answer.")] = 64,
    requests: Annotated[int, typer.Option(help="Maximum concurrent requests per server.")] = 32,
) -> None:
    """Measure a pair under each window and print the table."""
    lengths = [int(length) for length in contexts.split(",")]
    by_seed = [conversations(pair, lengths, seed) for seed in range(number)]
    inputs = list(zip(*by_seed, strict=True))
    rows: list[Row] = []
    for window in (NO_WINDOW, *(int(window) for window in windows.split(","))):
        option = ("--speculative-draft-window-size", str(window)) if window else ()
        rows += measure(launch(pair, MODE, requests, *option), window, inputs, new_tokens)
    typer.echo(describe_hardware(hardware()))
    typer.echo(table(rows, rows[0][3]).markdown())


if __name__ == "__main__":
    typer.run(main)
