"""The command line ``sglang-dflash``, with the commands of other installed distributions.

Modules that import torch or SGLang are imported when a command runs: help and a typing error need none of them.
"""

from __future__ import annotations

import gc
import json
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Annotated

import typer

from sglang_dflash import __version__
from sglang_dflash.check.machine import GPUS

if TYPE_CHECKING:
    from sglang_dflash.check.diagnose.verdict import Diagnosis

OTHER_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True}
ANY_ARGUMENTS = {**OTHER_ARGUMENTS, "help_option_names": []}
JSON = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)


@app.callback()
def main() -> None:
    """Check, serve and measure DFLASH speculative decoding with stock SGLang.

    Example: sglang-dflash check Qwen/Qwen3.5-4B z-lab/Qwen3.5-4B-DFlash
    """


@app.command(context_settings=OTHER_ARGUMENTS)
def check(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="TARGET [DRAFTER] [FLAGS]...",
            help="Directories or hub ids, then flags of the server, or a launch command. The drafter may be auto "
            "(the published one), or left out.",
        ),
    ],
    as_json: JSON = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="List all checks and the memory table.")] = False,
    memory_gib: Annotated[
        float | None,
        typer.Option(help="Check against this much memory: of --gpu, a Hopper GPU, or a CPU with --device cpu."),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help=f"Check this GPU instead of the local one: {', '.join(GPUS)}, or its end (4090).")
    ] = None,
    users: Annotated[
        int | None, typer.Option(min=1, help="Concurrent requests: use the block that the drafter's card had fastest.")
    ] = None,
) -> None:
    """Check a pair, its memory and server flags before a start.

    Only configurations and safetensors headers are read. The first line is the verdict. Exit status: 0 no problem,
    1 warnings, 2 errors.

    Example: sglang-dflash check Qwen/Qwen3.5-4B z-lab/Qwen3.5-4B-DFlash
    """
    gc.disable()  # imports allocate a million objects that stay: a sixth of the run time
    try:
        from sglang_dflash.check.command import examine

        report, title = examine(words, memory_gib, gpu, users)
    finally:
        gc.enable()
    typer.echo(json.dumps(report.as_json(), indent=2) if as_json else "\n".join(report.lines(title, verbose=verbose)))
    raise typer.Exit(report.exit_code)


@app.command()
def doctor(
    as_json: JSON = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="List what is patched in SGLang.")] = False,
) -> None:
    """Check which worker serves DFLASH here, and with which versions.

    Load SGLang's plugins as a launch does, without a model. Exit status: 0 this package would serve DFLASH, 1 it would
    not (the first line gives the reason).

    Example: sglang-dflash doctor
    """
    from sglang_dflash.check.doctor import examine

    report = examine()
    typer.echo(json.dumps(report.as_json(), indent=2) if as_json else "\n".join(report.lines(verbose=verbose)))
    raise typer.Exit(1 if report.problem else 0)


async def _diagnose(url: str, key: str | None, tokens: int, context: int, seconds: float, as_json: bool) -> Diagnosis:
    from sglang_dflash.check.diagnose.client import Client
    from sglang_dflash.check.diagnose.verdict import diagnose as examine_server

    async with Client(url, key) as client:
        return await examine_server(client, tokens, context, seconds, lambda line: typer.echo(line, err=as_json))


@app.command()
def diagnose(
    url: Annotated[str, typer.Argument(help="The server, for example http://127.0.0.1:30000.")],
    api_key: Annotated[str | None, typer.Option(help="API key of the server.")] = None,
    max_tokens: Annotated[int, typer.Option(min=16, help="Maximum tokens per answer.")] = 128,
    context: Annotated[int, typer.Option(min=1, help="Approximate length of the long prompts, in tokens.")] = 1000,
    seconds: Annotated[float, typer.Option(min=1, help="Maximum duration; a slow server gets fewer prompts.")] = 120,
    as_json: JSON = False,
) -> None:
    """Measure how much drafting helps on a running server, and what limits it.

    Print the server's state, then send it up to 36 short prompts. An interruption, such as Ctrl-C, ends with a partial
    verdict. Exit status: 0 no problem, 1 a problem (the verdict says what to change), 2 no DFLASH server at this
    address.

    Example: sglang-dflash diagnose http://127.0.0.1:30000
    """
    import asyncio

    from sglang_dflash.check import user_errors

    with user_errors():
        report = asyncio.run(_diagnose(url, api_key, max_tokens, context, seconds, as_json))
        typer.echo(json.dumps(report.as_json(), indent=2) if as_json else str(report))
    raise typer.Exit(1 if report.verdict else 0)


@app.command()
def version() -> None:
    """Print the versions of this package and of SGLang.

    Example: sglang-dflash version
    """
    from sglang_dflash.upstream import TESTED_SGLANG, installed_version

    typer.echo(f"sglang-dflash {__version__} for SGLang {TESTED_SGLANG}; installed: {installed_version()}")


def _add(point: EntryPoint) -> None:
    """Add a command of another distribution, which is imported when it runs."""

    @app.command(point.name, short_help=f"Of {point.dist and point.dist.name}.", context_settings=ANY_ARGUMENTS)
    def run(context: typer.Context) -> None:
        found = loaded(point)
        found(context.args, prog_name=context.command_path)


def loaded(point: EntryPoint) -> typer.Typer:
    command = point.load()
    if isinstance(command, typer.Typer):
        return command
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    alone.command()(command)
    return alone


COMMANDS = {point.name: point for point in entry_points(group="sglang_dflash.commands")}
for each in COMMANDS.values():
    _add(each)

if __name__ == "__main__":
    app()
