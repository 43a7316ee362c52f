"""Measure a draft window by context length: ``python -m sglang_dflash_lab.measure.draft_window``.

One server per window, one request at a time, prompts of the pair's training tasks. Then agents: turns of several users
at once, whose prompts grow by an answer and a tool's result.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import httpx
import typer

from sglang_dflash_lab.bench.figures import number
from sglang_dflash_lab.bench.provenance import describe_hardware, hardware
from sglang_dflash_lab.bench.server import Launch, running
from sglang_dflash_lab.measure import launch, token_ids
from sglang_dflash_lab.pairs import NAMES
from sglang_dflash_lab.pairs.corpus import TASKS, prompts
from sglang_dflash_lab.tables import Table

NO_WINDOW = 0
USERS, TURNS, SYSTEM = 6, 8, 400  # SYSTEM: tokens of the system prompt
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


def prefilled(generate: Callable[[list[int], int], dict[str, Any]], parts: list[list[int]], most: int) -> list[int]:
    """Return the tokens that all users' prompts computed in each turn; users share a system prompt."""
    asked, turns = [[*sum(parts[:8], [])[:SYSTEM], *part] for part in parts[8 : 8 + USERS]], []
    for turn in range(TURNS):
        with ThreadPoolExecutor(USERS if turn else 1) as pool:  # the first turn's hits depend on the order
            answers = list(pool.map(lambda prompt: generate(prompt, most), asked))
        turns.append(sum(len(p) - a["meta_info"]["cached_tokens"] for p, a in zip(asked, answers, strict=True)))
        results = (parts[(8 + USERS + USERS * turn + user) % len(parts)] for user in range(USERS))
        asked = [[*p, *a["output_ids"], *r] for p, a, r in zip(asked, answers, results, strict=True)]
    return turns


def draft_kv_bytes(server: Launch) -> int:
    """Return the size of the drafter's K/V pool by ``sglang-dflash check``; tests compare it with a server's."""
    flag, target, *flags = server.args
    assert flag == "--model-path"
    command = [sys.executable, "-m", "sglang_dflash.check.cli", "check", "--json", "--memory-gib", "64", target]
    done = subprocess.run([*command, "--device", "cpu", *flags], stdout=subprocess.PIPE, check=False)
    return int(json.loads(done.stdout)["memory"]["served"]["bytes"]["draft_kv"])


def measure(
    server: Launch, window: int, inputs: Sequence[Sequence[list[int]]], parts: list[list[int]], new_tokens: int
) -> tuple[list[Row], list[int]]:
    """Return one row per inner list of ``inputs``, whose prompts have the same length, and agents' prefilled tokens."""
    rows, size = [], draft_kv_bytes(server)
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
            rows.append((window, len(same_length[0]), accept, size, cached, fmean(map(len, turns)) - cached))
        http.post("/flush_cache", params={"timeout": 30}).raise_for_status()
        return rows, prefilled(generate, parts, new_tokens)


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
    parts = token_ids(pair, [prompt for task in TASKS for prompt in prompts(task, n=8, seed=7)])
    rows: list[Row] = []
    agents = []
    for window in (NO_WINDOW, *(int(window) for window in windows.split(","))):
        option = ("--speculative-draft-window-size", str(window)) if window else ()
        measured, turns = measure(launch(pair, MODE, requests, *option), window, inputs, parts, new_tokens)
        rows += measured
        agents.append([str(window or "none"), *map(str, turns), str(sum(turns))])
    typer.echo(describe_hardware(hardware()))
    typer.echo(table(rows, rows[0][3]).markdown())
    columns = ["window", *(f"turn {turn + 1}" for turn in range(TURNS)), "sum"]
    typer.echo(Table(f"Tokens prefilled by {USERS} agents", "", columns, agents).markdown())


if __name__ == "__main__":
    typer.run(main)
