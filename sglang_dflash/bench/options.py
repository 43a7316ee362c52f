"""The command line's options, shared by `bench`, `bench trace` and `bench profile`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

PairName = Annotated[
    str | None,
    typer.Option("--pair", help="tiny-hybrid, tiny-moe, tiny-dense, or a card's target: Qwen3.5-4B, …"),
]
Target = Annotated[str | None, typer.Option("--target", help="Path or hub name of a target, instead of the pair's.")]
Draft = Annotated[str | None, typer.Option("--draft", help="Path or hub name of a drafter, instead of the pair's.")]
DrafterKind = Annotated[
    str,
    typer.Option("--drafter", help="Drafter of a tiny pair: good, weak, swa, interleaved, mismatched."),
]
Modes = Annotated[
    str,
    typer.Option(
        help="Comma-separated arms: ar, dflash:BLOCK, builtin:BLOCK, mtp:STEPS. "
        "+NAME=VALUE after an arm sets an environment variable of its server."
    ),
]
Tasks = Annotated[
    str | None,
    typer.Option("--tasks", help="Comma-separated; default: the tiny pairs' four, or those of the card with figures."),
]
Concurrency = Annotated[str, typer.Option(help="Comma-separated numbers of requests in flight.")]
NumPrompts = Annotated[int, typer.Option(min=1, help="Questions per run.")]
Repeats = Annotated[int, typer.Option(min=1, help="Repetitions in alternating order; three or more give an interval.")]
MaxTokens = Annotated[
    int | None, typer.Option(help="Longest answer; default 4096 as on the cards, 512 for a tiny pair.")
]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 is greedy, as on the cards.")]
Thinking = Annotated[
    bool | None,
    typer.Option(
        "--thinking/--no-thinking",
        help="The chat template's switch; default: on for a card's pair, off for a tiny one.",
    ),
]
Seed = Annotated[int, typer.Option(help="Of the choice of questions and of sampling.")]
BaseUrl = Annotated[
    list[str] | None,
    typer.Option(help="Measure running servers: URL for a single mode, MODE=URL for each of several."),
]
OneAtATime = Annotated[
    bool | None,
    typer.Option(
        "--one-at-a-time/--together",
        help="Whether each server has the machine for itself; default: together for a tiny pair.",
    ),
]
ServerArgs = Annotated[str, typer.Option(help="Further arguments of every server, as one string.")]
BuiltinShims = Annotated[
    Path | None,
    typer.Option(help="Put on the PYTHONPATH of builtin arms: what SGLang's own worker lacks on a CPU."),
]
DataDir = Annotated[Path | None, typer.Option(help="Folder with <task>.jsonl files, where no hub is reachable.")]
Out = Annotated[Path, typer.Option(help="Folder of the results; the same command with it resumes.")]
ResultsFolder = Annotated[Path, typer.Argument(help="What --out of the benchmark was.")]
