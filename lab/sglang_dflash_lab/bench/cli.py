"""``sglang-dflash bench`` and ``sglang-dflash report``: read the options and hand over.

What a command needs is imported when it runs, so that ``sglang-dflash --help`` works without the ``bench`` extra.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sglang_dflash.user_errors import user_errors
from sglang_dflash_lab.bench.options import Options, takes_options

app = typer.Typer()
_INTERRUPTED = 130


@app.callback(invoke_without_command=True)
@takes_options
def bench(options: Options, context: typer.Context) -> None:
    """Measure plain decoding against DFLASH and its peers on real servers, and print the cards' tables.

    Runs modes x concurrencies x tasks in alternating order, each answer checked. Ctrl-C keeps what was measured, and
    the same command goes on from there.
    """
    if context.invoked_subcommand is not None:
        return
    from sglang_dflash.diagnose.tables import wide_console
    from sglang_dflash_lab.bench import results
    from sglang_dflash_lab.bench.session import Session
    from sglang_dflash_lab.bench.settings import configure
    from sglang_dflash_lab.bench.summary import Summary
    from sglang_dflash_lab.bench.tables import all_tables

    settings, console, status = configure(options), wide_console(), 0
    try:
        Session(settings, console).run()
    except KeyboardInterrupt:
        status = _INTERRUPTED
        console.print("interrupted: the tables show the runs that were finished")
    for table in all_tables(Summary(results.read_finished(settings.out))):
        table.print(console)
    console.print(f"raw results: {settings.out / results.FILE_NAME}; page: sglang-dflash report {settings.out}")
    raise typer.Exit(status)


def report(folder: Annotated[Path, typer.Argument(help="What --out of the benchmark was.")]) -> None:
    """Write one self-contained HTML page, PNG figures and a CSV file into the results folder of a benchmark."""
    with user_errors():
        from sglang_dflash_lab.bench.report import write_report

        typer.echo(write_report(folder))
