"""``sglang-dflash pairs``: list and find the tiny pairs, and print prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from sglang_dflash.check import user_errors
from sglang_dflash_lab.pairs import NAMES, NOISY, drafter_kinds, drafter_path, target_path
from sglang_dflash_lab.pairs.corpus import TASKS, prompts
from sglang_dflash_lab.tables import Table, wide_console

app = typer.Typer(
    no_args_is_help=True,
    help="""List and find the tiny trained pairs, or print prompts.

    Example: sglang-dflash pairs path tiny-hybrid --drafter good
    """,
)
Name = Annotated[str, typer.Argument(help=", ".join(NAMES))]


@app.command()
def path(
    name: Name,
    drafter: Annotated[str | None, typer.Option(help="Print this drafter's folder (noisy: made on first use).")] = None,
) -> None:
    """Print the folder of a pair's target, or of one of its drafters.

    Example: sglang-dflash pairs path tiny-hybrid --drafter good
    """
    with user_errors():
        typer.echo(drafter_path(name, drafter) if drafter else target_path(name))


@app.command("list")
def list_pairs() -> None:
    """Print sizes, correct answers and accept lengths at block size 16.

    Example: sglang-dflash pairs list
    """
    for table in tables():
        table.print(wide_console())


def tables() -> Iterator[Table]:
    columns, targets, drafters = ["MB", *TASKS], [], []
    for name in NAMES:
        accuracy = _measured(target_path(name) / "provenance.json", "accuracy")
        rates = [f"{accuracy[task].get('correct', 0):.0%}" for task in TASKS]
        targets.append([name, _size(target_path(name)), *rates])
        for kind in (*drafter_kinds(name), NOISY):
            # Listing does not generate the noisy drafter, which has the good one's size.
            folder = drafter_path(name, "good" if kind == NOISY else kind)
            figures = folder.with_name("noisy.json") if kind == NOISY else folder / "provenance.json"
            accepted = _measured(figures, "accept_lengths")
            lengths = [f"{accepted[task]['accept_length']['16']:.1f}" for task in TASKS]
            drafters.append([name, kind, _size(folder), *lengths])
    yield Table("Targets", "correct answers to held-out prompts", ["pair", *columns], targets)
    yield Table("Drafters", "tokens per verify step at block size 16", ["pair", "drafter", *columns], drafters)


def _measured(path: Path, name: str) -> dict[str, Any]:
    measured: dict[str, Any] = json.loads(path.read_text())[name]
    return measured


def _size(folder: Path) -> str:
    return f"{(folder / 'model.safetensors').stat().st_size / 1e6:.1f}"


@app.command("prompts")
def print_prompts(
    name: Name,
    task: Annotated[str, typer.Option(help=", ".join(TASKS))] = TASKS[0],
    split: Annotated[str, typer.Option(help="train or heldout")] = "heldout",
    n: Annotated[int, typer.Option("-n", help="Number of prompts.")] = 8,
    seed: int = 0,
    shape: Annotated[str | None, typer.Option(help="single, turns or document; default: a mixture")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """Print prompts with their checkable answers; all pairs are trained on the same tasks.

    Example: sglang-dflash pairs prompts tiny-hybrid --task math -n 2
    """
    with user_errors():
        target_path(name)
        asked = prompts(task, split, n, seed, shape)
    if as_json:
        typer.echo(json.dumps([asdict(prompt) for prompt in asked], indent=1))
        return
    for prompt in asked:
        turns = "".join(f"[{message['role']}] {message['content']}\n" for message in prompt.messages)
        typer.echo(f"{turns}[expected] {prompt.answer}\n")
