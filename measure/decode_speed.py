"""How fast one user gets tokens, and a prompt of 1,000: ``python measure/decode_speed.py --model PATH``.

Plain decoding of any target through the server; the figures to look at first on a new machine.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from sglang_dflash.bench.client import Client, Sampling
from sglang_dflash.bench.provenance import describe_hardware, hardware
from sglang_dflash.bench.server import Launch, running

DECODED = 256
SHORT_PROMPT, LONG_PROMPT = 32, 1000
_FIRST_ID, _LAST_ID = 20, 500  # ordinary tokens of every tokenizer with at least 500


async def measure(launch: Launch, repeats: int, seed: int) -> tuple[list[float], list[float]]:
    """-> per repeat: decoded tokens/s at concurrency 1, and seconds from sending 1,000 tokens to the first answer."""
    rng = Random(seed)
    decode, prefill = [], []
    with TemporaryDirectory() as folder:
        async with running(launch, Path(folder) / "server.log") as url, Client(url) as client:
            for repeat in range(1 + repeats):  # the first warms up
                short, long = (
                    [rng.randint(_FIRST_ID, _LAST_ID) for _ in range(length)] for length in (SHORT_PROMPT, LONG_PROMPT)
                )
                answer = await client.generate(short, Sampling(DECODED, ignore_eos=True))
                first = await client.generate(long, Sampling(1, ignore_eos=True))
                if repeat:
                    decode.append((DECODED - 1) / (answer.latency_s - answer.ttft_s))
                    prefill.append(first.ttft_s)
    return decode, prefill


def main(
    model: Annotated[str, typer.Option(help="Path or hub name of a target.")],
    dtype: str = "float32",
    repeats: int = 5,
    seed: int = 0,
) -> None:
    """Median and range over repeats, of a server started for it."""
    launch = Launch(("--model-path", model, "--dtype", dtype, "--max-running-requests", "1"))
    decode, prefill = asyncio.run(measure(launch, repeats, seed))
    typer.echo(launch.describe())
    typer.echo(describe_hardware(hardware()))
    typer.echo(f"decode, concurrency 1, {DECODED} tokens: {_spread(decode, 0, 'tok/s')}")
    typer.echo(f"prefill of {LONG_PROMPT} tokens: {_spread(prefill, 3, 's')}")


def _spread(values: list[float], digits: int, unit: str) -> str:
    low, middle, high = (f"{value:.{digits}f}" for value in (min(values), median(values), max(values)))
    return f"median {middle} {unit} ({low} to {high}, {len(values)} runs)"


if __name__ == "__main__":
    typer.run(main)
