"""What a draft window costs and saves, by context length: ``python -m sglang_dflash_lab.measure.draft_window``.

One server per window, one request at a time. A prompt of the wanted length is the end of a run of the pair's own
conversations, so that the target keeps writing what it was trained to write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from sglang_dflash.diagnose.client import WORKER_KEY, Client, Sampling
from sglang_dflash_lab.bench.options import Options
from sglang_dflash_lab.bench.provenance import describe_hardware, hardware
from sglang_dflash_lab.bench.runner import internal_state
from sglang_dflash_lab.bench.server import Launch, running
from sglang_dflash_lab.bench.settings import configure
from sglang_dflash_lab.bench.tables import Table, number
from sglang_dflash_lab.pairs import NAMES, target_path

NO_WINDOW = 0
MODE = "dflash:16+SGLANG_DFLASH_STAGE_TIMES=1"


@dataclass(frozen=True)
class Row:
    """One window at one context length.

    Attributes:
        window: context tokens that the drafter reads; 0 for all.
        context: prompt, tokens.
        accept_length: new tokens per verified block, mean over the prompts.
        draft_ms: host time of the draft stage per step.
        draft_kv: bytes of the drafter's K/V pool, from the allocator.
        reused, recomputed: tokens of the same prompt sent again, with one turn more: from the prefix cache, and not.
    """

    window: int
    context: int
    accept_length: float
    draft_ms: float
    draft_kv: int
    reused: float
    recomputed: float


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
    option = f" --speculative-draft-window-size {window}" if window else ""
    options = Options(pair=pair, modes=MODE, concurrency=str(requests), server_args=f"--skip-tokenizer-init{option}")
    settings = configure(options)
    return settings.launch(settings.modes[0])


async def measure(launch: Launch, window: int, prompts: Sequence[Sequence[list[int]]], new_tokens: int) -> list[Row]:
    """One row per inner list of ``prompts``, all of one length."""
    rows = []
    sampling = Sampling(new_tokens)
    with TemporaryDirectory() as folder:
        async with running(launch, Path(folder) / "server.log") as url, Client(url) as client:
            await client.generate(prompts[0][0], sampling)  # warms up
            for same_length in prompts:
                await client.flush_cache()
                before = await _worker(client)
                first = [await client.generate(prompt, sampling) for prompt in same_length]
                after = await _worker(client)
                turns = [
                    [*prompt, *answer.event["output_ids"]] for prompt, answer in zip(same_length, first, strict=True)
                ]
                second = [await client.generate(turn, Sampling(1, ignore_eos=True)) for turn in turns]
                cached = fmean(answer.event["meta_info"]["cached_tokens"] for answer in second)
                draft_s = after["stage_seconds"]["draft"] - before["stage_seconds"].get("draft", 0.0)
                row = Row(
                    window=window,
                    context=len(same_length[0]),
                    accept_length=fmean(answer.event["meta_info"]["spec_accept_length"] for answer in first),
                    draft_ms=1000 * draft_s / (_steps(after) - _steps(before)),
                    draft_kv=after["memory_bytes"]["draft_kv"],
                    reused=cached,
                    recomputed=fmean(len(turn) for turn in turns) - cached,
                )
                rows.append(row)
    return rows


async def _worker(client: Client) -> dict[str, Any]:
    return dict((await internal_state(client))[WORKER_KEY])


def _steps(worker: dict[str, Any]) -> int:
    return sum(worker["steps_by_width"].values())


def table(rows: Sequence[Row], one_slot_per_token: int) -> Table:
    """The rows; ``one_slot_per_token`` is the K/V of a drafter pool as large as the target's, in bytes."""
    cells = []
    for row in rows:
        sizes = [f"{size / 2**20:.1f} MiB" for size in (row.draft_kv, one_slot_per_token)]
        share = f"{row.draft_kv / one_slot_per_token:.1%}"
        lengths = [number(row.accept_length), number(row.draft_ms)]
        tokens = [number(row.reused, 0), number(row.recomputed, 0)]
        cells.append([str(row.window or "none"), str(row.context), *lengths, *sizes, share, *tokens])
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
        rows += asyncio.run(measure(launch(pair, window, requests), window, inputs, new_tokens))
    typer.echo(describe_hardware(hardware()))
    typer.echo(table(rows, rows[0].draft_kv).markdown())


if __name__ == "__main__":
    typer.run(main)
