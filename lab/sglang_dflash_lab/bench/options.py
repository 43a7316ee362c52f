"""The options of ``bench``, each declared once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from sglang_dflash.user_errors import user_errors


@dataclass(frozen=True)
class Options:
    """The command line as the user typed it. A field is an option, its annotation says how Typer shows it."""

    pair: Annotated[
        str | None, typer.Option(help="tiny-hybrid, tiny-moe, tiny-dense, or a card's target: Qwen3.5-4B, …")
    ] = None
    target: Annotated[str | None, typer.Option(help="Path or hub name of a target, instead of the pair's.")] = None
    draft: Annotated[str | None, typer.Option(help="Path or hub name of a drafter, instead of the pair's.")] = None
    drafter: Annotated[
        str, typer.Option(help="Drafter of a tiny pair: good, noisy, weak, swa, interleaved, mismatched.")
    ] = "good"
    modes: Annotated[
        str,
        typer.Option(
            help="Comma-separated arms: ar, dflash:BLOCK, adaptive:BLOCK, builtin:BLOCK, mtp:STEPS. "
            "+NAME=VALUE after an arm sets an environment variable of its server."
        ),
    ] = "ar,dflash:8,dflash:16"
    tasks: Annotated[
        str | None,
        typer.Option(help="Comma-separated; default: the tiny pairs' four, or those of the card with figures."),
    ] = None
    concurrency: Annotated[str, typer.Option(help="Comma-separated numbers of requests in flight.")] = "1,8"
    num_prompts: Annotated[int, typer.Option(min=1, help="Questions per run.")] = 32
    repeats: Annotated[
        int, typer.Option(min=1, help="Repetitions in alternating order; three or more give an interval.")
    ] = 5
    max_tokens: Annotated[
        int | None, typer.Option(help="Longest answer; default 4096 as on the cards, 512 for a tiny pair.")
    ] = None
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy, as on the cards.")] = 0.0
    thinking: Annotated[
        bool | None,
        typer.Option(help="The chat template's switch; default: on for a card's pair, off for a tiny one."),
    ] = None
    seed: Annotated[int, typer.Option(help="Of the choice of questions and of sampling.")] = 0
    base_url: Annotated[
        list[str] | None,
        typer.Option(help="Measure running servers: URL for a single mode, MODE=URL for each of several."),
    ] = None
    one_at_a_time: Annotated[
        bool | None,
        typer.Option(
            "--one-at-a-time/--together",
            help="Whether each server has the machine for itself; default: together for a tiny pair.",
        ),
    ] = None
    server_args: Annotated[str, typer.Option(help="Further arguments of every server, as one string.")] = ""
    builtin_shims: Annotated[
        Path | None,
        typer.Option(help="Put on the PYTHONPATH of builtin arms: what SGLang's own worker lacks on a CPU."),
    ] = None
    data_dir: Annotated[Path | None, typer.Option(help="Folder with <task>.jsonl files, if no hub is reachable.")] = (
        None
    )
    out: Annotated[Path, typer.Option(help="Folder of the results; the same command with it resumes.")] = Path(
        "bench-results"
    )


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a Typer command one option per field of :class:`Options`, passed to it as its first argument.

    Typer reads the options of a command from its signature. The signature made here has the command's own parameters,
    then the fields. Errors of the user end the command with one message.
    """
    _, *own = signature(command, eval_str=True).parameters.values()
    hints = get_type_hints(Options, include_extras=True)
    shared = [
        Parameter(f.name, Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name]) for f in fields(Options)
    ]

    @wraps(command)
    def run(**given: Any) -> None:
        chosen = {option.name: given.pop(option.name) for option in shared}
        with user_errors():
            command(Options(**chosen), **given)

    run.__signature__ = Signature([*own, *shared])  # type: ignore[attr-defined]
    return run
