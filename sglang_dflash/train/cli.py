"""``sglang-dflash pairs train``, ``train-drafter`` and ``measure``: they need PyTorch, which loads after the arguments.

The commands that find a pair are in :mod:`sglang_dflash.pairs.cli`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from sglang_dflash.pairs import DRAFTER_KINDS, check_known, drafter_kinds, drafter_path, target_path
from sglang_dflash.pairs.cli import Name, app, user_errors


@app.command()
def train(
    name: Name,
    out: Annotated[Path, typer.Option(help="Where target/ and drafter-*/ go.")],
    work: Annotated[Path, typer.Option(help="Checkpoints and generated data; run again to continue.")],
    seed: int = 0,
    device: str = "cpu",
    steps: Annotated[int | None, typer.Option(help="Steps of each model instead of the recipe's, for a trial.")] = None,
    drafter: Annotated[list[str] | None, typer.Option(help="Only these drafters; default: all of the pair's.")] = None,
    measure: Annotated[bool, typer.Option(help="Measure accuracy and accept lengths afterwards.")] = True,
    threads: Annotated[int, typer.Option(help="PyTorch's threads; these models are too small for many.")] = 1,
) -> None:
    """Train a pair from nothing and write its provenance: 30 to 60 minutes on one CPU core, resumable."""
    with user_errors():
        kinds = drafter or list(drafter_kinds(name))
        for kind in kinds:
            check_known(f"drafter of {name}", kind, drafter_kinds(name))
    import torch

    from sglang_dflash.train.recipe import train_pair

    torch.set_num_threads(threads)
    train_pair(name, out, work, seed, device, steps, kinds, measure)


@app.command("train-drafter")
def train_drafter(
    target: Annotated[
        Path, typer.Argument(help="Folder of a Hugging Face causal LM with tokenizer and chat template.")
    ],
    out: Annotated[Path, typer.Option(help="The drafter's folder.")],
    work: Annotated[Path, typer.Option(help="Checkpoints and generated data; run again to continue.")],
    kind: Annotated[str, typer.Option(help="good, weak, swa or interleaved")] = "good",
    chats: Annotated[Path | None, typer.Option(help="JSON lines, each a list of chat messages to be answered.")] = None,
    mask_token_id: Annotated[int | None, typer.Option(help="An unused id, if the tokenizer has no mask token.")] = None,
    start: Annotated[Path | None, typer.Option(help="A trained drafter of the same widths to start from.")] = None,
    seed: int = 0,
    device: str = "cpu",
    steps: int | None = None,
    threads: int = 1,
) -> None:
    """Train a drafter for your own target. See docs/pairs.md for what this recipe can and cannot do."""
    with user_errors():
        check_known("kind of drafter", kind, DRAFTER_KINDS)
    import torch

    from sglang_dflash.train.drafter_training import train_drafter

    torch.set_num_threads(threads)
    given = [(json.loads(line), False) for line in chats.read_text().splitlines() if line.strip()] if chats else None
    train_drafter(kind, target, out, work, seed, device, steps, given, mask_token_id, start)


@app.command()
def measure(
    name: Name,
    drafter: Annotated[
        list[str] | None, typer.Option(help="Measure this drafter's accept lengths, not accuracy; may be repeated.")
    ] = None,
    n: Annotated[int | None, typer.Option("-n", help="Prompts per task.")] = None,
    save: Annotated[bool, typer.Option(help="Write the figures to the shipped provenance file.")] = False,
    threads: int = 1,
) -> None:
    """Measure a shipped target's accuracy or drafters' accept lengths on held-out prompts."""
    with user_errors():
        target = target_path(name)
        for kind in drafter or () if save else ():
            check_known(f"drafter of {name}", kind, drafter_kinds(name))
        folders = [drafter_path(name, kind) for kind in drafter or ()]
    import torch

    from sglang_dflash.train.measure import measure_accept_lengths, measure_accuracy
    from sglang_dflash.train.provenance import add_measurement
    from sglang_dflash.train.recipe import ACCEPT_PROMPTS, ACCURACY_PROMPTS

    torch.set_num_threads(threads)
    plain_outputs: dict[tuple[int, ...], list[int]] = {}
    for folder in folders or [target]:
        if folder == target:
            key, table = "accuracy", measure_accuracy(target, n or ACCURACY_PROMPTS)
        else:
            key, count = "accept_lengths", n or ACCEPT_PROMPTS
            table = measure_accept_lengths(target, folder, count, plain_outputs=plain_outputs)
        if save:
            add_measurement(folder, key, table)
        typer.echo(json.dumps({folder.name: table}, indent=1))
