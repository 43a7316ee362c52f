"""What a draft window costs and saves, by context length: ``python -m sglang_dflash_lab.measure.draft_window``.

One server per window, one request at a time. A prompt of the wanted length is the end of a run of the pair's own
conversations, so that the target keeps writing what it was trained to write.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import httpx
import typer

from sglang_dflash.diagnose.client import WORKER_KEY
from sglang_dflash_lab.bench.arms import find_pair, parse_arms
from sglang_dflash_lab.bench.figures import number
from sglang_dflash_lab.bench.provenance import describe_hardware, hardware
from sglang_dflash_lab.bench.server import Launch, running
from sglang_dflash_lab.bench.session import Settings
from sglang_dflash_lab.pairs import NAMES, target_path
from sglang_dflash_lab.tables import Table

NO_WINDOW = 0
MODE = "dflash:16+SGLANG_DFLASH_STAGE_TIMES=1"


# Tokens that the drafter reads (0: all), prompt tokens, new tokens per verified block, milliseconds of the draft stage
# per step, bytes of the drafter's K/V pool; of the next turn: tokens from the prefix cache, and others.
Row = tuple[int, int, float, float, int, float, float]


def conversations(pair: str, lengths: Sequence[int], seed: int) -> list[list[int]]:
    """One prompt of each length in tokens."""
    import transformers

    from sglang_dflash_lab.pairs.corpus.prompts import TASKS, prompts

    tokenizer = transformers.AutoTokenizer.from_pretrained(target_path(pair))
    tokens: list[int] = []
    number = 0
    while len(tokens) < max(lengths):
        for task in TASKS:
            (prompt,) = prompts(task, n=1, seed=seed * 1000 + number)
            number += 1
            tokens += tokenizer.apply_chat_template(
                list(prompt.messages), add_generation_prompt=True, return_dict=False
            )
    return [tokens[-length:] for length in lengths]


def launch(pair: str, window: int, requests: int) -> Launch:
    """A server of the pair with ``window`` (0: none), for ``requests`` at once."""
    option = ("--speculative-draft-window-size", str(window)) if window else ()
    arguments = ("--skip-tokenizer-init", *option)
    arms, found = parse_arms(MODE), find_pair(pair, None, None)
    settings = Settings(found, arms, [], [requests], 0, 1, Path(), server_args=arguments)
    return settings.launch(arms[0])


def measure(launch: Launch, window: int, prompts: Sequence[Sequence[list[int]]], new_tokens: int) -> list[Row]:
    """One row per inner list of ``prompts``, all of one length."""
    rows = []
    with (
        TemporaryDirectory() as folder,
        running(launch, Path(folder) / "server.log") as url,
        httpx.Client(base_url=url, timeout=3600, trust_env=False) as http,
    ):

        def generate(prompt: list[int], most: int) -> dict[str, Any]:
            sampling = {"temperature": 0, "max_new_tokens": most, "ignore_eos": most == 1}
            reply = http.post("/generate", json={"input_ids": prompt, "sampling_params": sampling})
            return dict(reply.raise_for_status().json())

        def worker() -> dict[str, Any]:
            return dict(http.get("/server_info").json()["internal_states"][0][WORKER_KEY])

        generate(prompts[0][0], new_tokens)  # warms up
        for same_length in prompts:
            http.post("/flush_cache", params={"timeout": 30}).raise_for_status()
            before = worker()
            first = [generate(prompt, new_tokens) for prompt in same_length]
            after = worker()
            turns = [[*prompt, *answer["output_ids"]] for prompt, answer in zip(same_length, first, strict=True)]
            cached = fmean(generate(turn, 1)["meta_info"]["cached_tokens"] for turn in turns)
            draft_s = after["stage_seconds"]["draft"] - before["stage_seconds"].get("draft", 0.0)
            steps = sum(after["steps_by_width"].values()) - sum(before["steps_by_width"].values())
            accept = fmean(answer["meta_info"]["spec_accept_length"] for answer in first)
            sizes = (1000 * draft_s / steps, after["memory_bytes"]["draft_kv"])
            rows.append((window, len(same_length[0]), accept, *sizes, cached, fmean(map(len, turns)) - cached))
    return rows


def table(rows: Sequence[Row], one_slot_per_token: int) -> Table:
    """The rows; ``one_slot_per_token`` is the K/V of a drafter pool as large as the target's, in bytes."""
    cells = []
    for window, context, accept, draft_ms, draft_kv, reused, recomputed in rows:
        sizes = [f"{size / 2**20:.1f} MiB" for size in (draft_kv, one_slot_per_token)]
        figures = [number(accept), number(draft_ms), *sizes, f"{draft_kv / one_slot_per_token:.1%}"]
        cells.append([str(window or "none"), str(context), *figures, number(reused, 0), number(recomputed, 0)])
    columns = ["window", "context", "accept length", "draft, ms a step", "draft K/V", "one slot per token", "share"]
    return Table("Draft windows", "", [*columns, "next turn: reused", "recomputed"], cells)


def main(
    pair: Annotated[str, typer.Option(help=f"One of {', '.join(NAMES)}.")] = "tiny-hybrid",
    windows: Annotated[
        str, typer.Option(help="Tokens; a server without a window is always measured too.")
    ] = "16,64,512,2048",
    contexts: Annotated[str, typer.Option(help="Prompt lengths, tokens.")] = "512,1024,2048,4096,8000",
    prompts: Annotated[int, typer.Option(help="Prompts of each length.")] = 4,
    new_tokens: Annotated[int, typer.Option(help="The longest answer.")] = 64,
    requests: Annotated[int, typer.Option(help="Requests that each server has room for.")] = 32,
) -> None:
    """Measure a pair under each window and print the table."""
    lengths = [int(length) for length in contexts.split(",")]
    by_seed = [conversations(pair, lengths, seed) for seed in range(prompts)]
    inputs = list(zip(*by_seed, strict=True))
    rows: list[Row] = []
    for window in (NO_WINDOW, *(int(window) for window in windows.split(","))):
        rows += measure(launch(pair, window, requests), window, inputs, new_tokens)
    typer.echo(describe_hardware(hardware()))
    typer.echo(table(rows, rows[0][4]).markdown())


if __name__ == "__main__":
    typer.run(main)
