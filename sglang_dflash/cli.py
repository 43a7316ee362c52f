"""``sglang-dflash``: the command line, one sub-command group per module."""

from __future__ import annotations

import typer

from sglang_dflash import __version__
from sglang_dflash.bench.cli import app as bench_app
from sglang_dflash.bench.cli import report as bench_report
from sglang_dflash.check.cli import CONTEXT, check
from sglang_dflash.diagnose.cli import diagnose
from sglang_dflash.pairs.cli import app as pairs_app

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="DFLASH speculative decoding for stock SGLang.",
)
app.add_typer(bench_app, name="bench")
app.command("report")(bench_report)
app.command("check", context_settings=CONTEXT)(check)
app.command("diagnose")(diagnose)
app.add_typer(pairs_app, name="pairs", help="Tiny trained target + drafter pairs: list, find, prompts.")


@app.command()
def version() -> None:
    """Print the package's version, the SGLang release that it is for, and the one that is installed."""
    from sglang_dflash.upstream import TESTED_SGLANG, installed_version

    typer.echo(f"sglang-dflash {__version__} for SGLang {TESTED_SGLANG}; installed: {installed_version()}")


if __name__ == "__main__":
    app()
