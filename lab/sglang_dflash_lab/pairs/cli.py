"""``sglang-dflash pairs``: find and list the tiny pairs, and print prompts for them."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from sglang_dflash.user_errors import user_errors
from sglang_dflash_lab.pairs import NAMES, drafter_path, target_path
from sglang_dflash_lab.pairs.corpus import TASKS, prompts
from sglang_dflash_lab.pairs.table import pair_figures, table_lines

app = typer.Typer(no_args_is_help=True, help="Tiny trained target + drafter pairs: list, find, prompts.")
Name = Annotated[str, typer.Argument(help=", ".join(NAMES))]


@app.command()
def path(
    name: Name,
    drafter: Annotated[str | None, typer.Option(help="Print this drafter's folder instead; noisy is made now.")] = None,
) -> None:
    """Print the folder of a pair's target, or of one of its drafters."""
    with user_errors():
        typer.echo(drafter_path(name, drafter) if drafter else target_path(name))


@app.command("list")
def list_pairs(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Print every pair's size, accuracy and accept lengths, as measured when it was trained."""
    figures = [pair_figures(name) for name in NAMES]
    if as_json:
        typer.echo(json.dumps(figures, indent=1))
    else:
        typer.echo("\n".join(table_lines(figures)))


@app.command("prompts")
def print_prompts(
    name: Name,
    task: Annotated[str, typer.Option(help=", ".join(TASKS))] = TASKS[0],
    split: Annotated[str, typer.Option(help="train or heldout")] = "heldout",
    n: Annotated[int, typer.Option("-n", help="How many.")] = 8,
    seed: int = 0,
    shape: Annotated[str | None, typer.Option(help="single, turns or document; default: a mixture")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """Print prompts with their checkable answers. All pairs are trained for the same ones."""
    with user_errors():
        target_path(name)
        asked = prompts(task, split, n, seed, shape)
    if as_json:
        typer.echo(json.dumps([asdict(prompt) for prompt in asked], indent=1))
        return
    for prompt in asked:
        for message in prompt.messages:
            typer.echo(f"[{message['role']}] {message['content']}")
        typer.echo(f"[expected] {prompt.answer}\n")
