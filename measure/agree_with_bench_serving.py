"""Our throughput beside ``sglang.bench_serving``'s on the same server and the same prompts, in pairs of runs.

A pair's runs follow each other, and which comes first alternates, so a machine that gets slower favours neither.

python measure/agree_with_bench_serving.py --pair tiny-hybrid --mode dflash:16 --concurrency 8
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory

import httpx
import typer
from rich.console import Console

from sglang_dflash.bench import results, runner
from sglang_dflash.bench.options import Options
from sglang_dflash.bench.server import running
from sglang_dflash.bench.session import Session
from sglang_dflash.bench.settings import Settings, configure
from sglang_dflash.bench.summary import Summary

SEED = 1  # of bench_serving


def main(
    pair: str = "tiny-hybrid",
    mode: str = "dflash:16",
    task: str = "mixed",
    concurrency: int = 1,
    num_prompts: int = 32,
    repeats: int = 5,
) -> None:
    """Print both medians and what they differ by."""
    with TemporaryDirectory() as folder:
        asyncio.run(compare(Path(folder), pair, mode, task, concurrency, num_prompts, repeats))


async def compare(out: Path, pair: str, mode: str, task: str, concurrency: int, num_prompts: int, repeats: int) -> None:
    options = Options(
        pair=pair,
        modes=mode,
        tasks=task,
        concurrency=str(concurrency),
        num_prompts=num_prompts,
        repeats=repeats,
        out=out,
    )
    settings = configure(options)
    theirs: list[dict[str, float]] = []
    async with running(settings.launch(settings.modes[0]), out / "server.log") as url:

        async def run_ours(pairs: int) -> None:
            session = replace(settings, repeats=pairs, base_urls={mode: url})
            await Session(session, Console(quiet=True)).measure()

        async def run_theirs(_: int) -> None:
            theirs.append(bench_serving(url, await export_prompts(out, url), settings.pair.target, settings))

        turns = [run_ours, run_theirs]
        for pairs in range(1, repeats + 1):
            for turn in turns:
                await turn(pairs)
            turns.reverse()
    ours = Summary(results.read(out)).throughput(mode, task, concurrency)
    report("output tok/s", list(ours.values()), [row["output_throughput"] for row in theirs])
    tokens = sum(r.completion_tokens for r in results.read(out).requests) / repeats
    report("output tokens of a run", [tokens] * repeats, [row["total_output_tokens"] for row in theirs])


async def export_prompts(out: Path, url: str) -> Path:
    """The prompts that were sent, as text in the shape that ``--dataset-name custom`` reads.

    That dataset is shuffled with the run's seed. The lines are written so that the shuffle puts them into our order:
    with many users, which requests are left at the end decides how well the last seconds are used.
    """
    dataset = out / "prompts_for_bench_serving.jsonl"
    asked = [json.loads(line)["input_ids"] for line in (out / runner.PROMPTS).read_text().splitlines()]
    order = list(range(len(asked)))
    Random(SEED).shuffle(order)
    lines = [""] * len(asked)
    async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
        for input_ids, position in zip(asked, order, strict=True):
            body = {"tokens": input_ids, "skip_special_tokens": False}
            text = (await http.post("/v1/detokenize", json=body)).json()["text"]
            lines[position] = json.dumps({"conversations": [{"content": text}, {"content": "an answer"}]}) + "\n"
    dataset.write_text("".join(lines))
    return dataset


def bench_serving(url: str, dataset: Path, tokenizer: str, settings: Settings) -> dict[str, float]:
    """One run of SGLang's harness: its own JSON line."""
    output = dataset.with_name("bench_serving.jsonl")
    output.unlink(missing_ok=True)
    subprocess.run(
        [
            sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang", "--base-url", url,
            "--dataset-name", "custom", "--dataset-path", str(dataset), "--tokenizer", tokenizer,
            "--sharegpt-output-len", str(settings.sampling.max_tokens), "--disable-ignore-eos",
            "--num-prompts", str(settings.num_prompts), "--max-concurrency", str(settings.concurrencies[0]),
            "--flush-cache", "--disable-tqdm", "--seed", str(SEED), "--output-file", str(output),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    row: dict[str, float] = json.loads(output.read_text().splitlines()[-1])
    return row


def report(name: str, ours: list[float], theirs: list[float]) -> None:
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    print(f"{name}: ours {median(ours):.1f}, bench_serving {median(theirs):.1f}, median of the pairs' ratios", end=" ")
    print(f"{100 * (median(ratios) - 1):+.1f} % ({', '.join(f'{100 * (r - 1):+.1f}' for r in ratios)})")


if __name__ == "__main__":
    typer.run(main)
