"""``sglang-dflash``: the command line, one sub-command group per module, and the commands of other distributions."""

from __future__ import annotations

from importlib.metadata import entry_points

import typer

from sglang_dflash import __version__
from sglang_dflash.check.cli import CONTEXT, check
from sglang_dflash.diagnose.cli import diagnose

OTHERS = "sglang_dflash.commands"
# Commands of the distribution sglang-dflash-lab, and their help where it is not installed.
LAB = {
    "bench": "Measure plain decoding against DFLASH (sglang-dflash-lab).",
    "report": "Write a page from a benchmark's results (sglang-dflash-lab).",
    "pairs": "List tiny trained pairs (sglang-dflash-lab).",
}
ANY_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="DFLASH speculative decoding for stock SGLang.",
)
app.command("check", context_settings=CONTEXT)(check)
app.command("diagnose")(diagnose)


@app.command()
def version() -> None:
    """Print the package's version, the SGLang release that it is for, and the one that is installed."""
    from sglang_dflash.upstream import TESTED_SGLANG, installed_version

    typer.echo(f"sglang-dflash {__version__} for SGLang {TESTED_SGLANG}; installed: {installed_version()}")


def add_others(app: typer.Typer) -> None:
    """Add the commands that other distributions declare, and for those of an absent lab one that names it."""
    found = {point.name: point for point in entry_points(group=OTHERS)}
    for name, point in found.items():
        command = point.load()
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)
    for name in LAB.keys() - found.keys():
        app.command(name, help=LAB[name], context_settings=ANY_ARGUMENTS)(missing)


def missing(context: typer.Context) -> None:
    typer.echo(
        f"`sglang-dflash {context.info_name}` is part of sglang-dflash-lab, which is not installed. "
        f"Fix: pip install sglang-dflash-lab=={__version__}",
        err=True,
    )
    raise typer.Exit(2)


add_others(app)

if __name__ == "__main__":
    app()
