"""Train or measure the tiny pairs: ``python -m sglang_dflash_lab.train train|measure PAIR``.

Training a pair takes 30 to 60 minutes on one CPU core and resumes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer

from sglang_dflash_lab.pairs import drafter_kinds, drafter_path, target_path
from sglang_dflash_lab.train.measure import measure_accept_lengths, measure_accuracy
from sglang_dflash_lab.train.recipe import ACCEPT_PROMPTS, ACCURACY_PROMPTS, train_pair

app = typer.Typer(no_args_is_help=True)


@app.command()
def train(
    name: str,
    out: Annotated[Path, typer.Option(help="Output folder for target/ and drafter-*/.")],
    work: Annotated[Path, typer.Option(help="Checkpoints and generated data; the same command resumes.")],
    seed: int = 0,
    device: str = "cpu",
    steps: Annotated[int | None, typer.Option(help="Steps per model, instead of the recipe's.")] = None,
    drafter: Annotated[list[str] | None, typer.Option(help="Only these drafters; default: all of the pair's.")] = None,
    measured: Annotated[bool, typer.Option(help="Measure accuracy and accept lengths afterwards.")] = True,
) -> None:
    """Train a pair and write its provenance."""
    train_pair(name, out, work, seed, device, steps, drafter or list(drafter_kinds(name)), measured)


@app.command()
def measure(name: str, drafter: str | None = None, n: int | None = None) -> None:
    """Print a shipped target's accuracy, or a drafter's accept lengths, on held-out prompts."""
    target = target_path(name)
    if drafter is None:
        table = measure_accuracy(target, n or ACCURACY_PROMPTS)
    else:
        table = measure_accept_lengths(target, drafter_path(name, drafter), n or ACCEPT_PROMPTS)
    typer.echo(json.dumps(table, indent=1))


if __name__ == "__main__":
    torch.set_num_threads(1)  # more threads slow these small models down
    app()
