"""``sglang-dflash bench`` and ``sglang-dflash report``: read the options and hand over.

What a command needs is imported when it runs, so that ``sglang-dflash --help`` works without the ``bench`` extra.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from sglang_dflash.bench.options import Options, takes_options
from sglang_dflash.user_errors import user_errors

app = typer.Typer()
_INTERRUPTED = 130
# Neither a trace nor a profile compares: one repeat, greedy.
_COMPARING = ("repeats", "temperature", "thinking", "seed", "one_at_a_time")


@app.callback(invoke_without_command=True)
@takes_options()
def bench(options: Options, context: typer.Context) -> None:
    """Measure plain decoding against DFLASH and its peers on real servers, and print the cards' tables.

    Runs modes x concurrencies x tasks in alternating order, each answer checked. Ctrl-C keeps what was measured, and
    the same command goes on from there.
    """
    if context.invoked_subcommand is not None:
        return
    from sglang_dflash.bench import results
    from sglang_dflash.bench.configure import configure
    from sglang_dflash.bench.session import Session
    from sglang_dflash.bench.summary import Summary
    from sglang_dflash.bench.tables import all_tables, wide_console

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
        from sglang_dflash.bench.report import write_report

        typer.echo(write_report(folder))


@app.command()
@takes_options(
    without=_COMPARING, modes="dflash:4,dflash:8,dflash:16", num_prompts=8, repeats=1, out=Path("bench-trace")
)
def trace(options: Options) -> None:
    """Record accept lengths and times of every step, and print what a step costs by width and concurrency."""
    from sglang_dflash.bench.configure import configure
    from sglang_dflash.bench.tables import wide_console
    from sglang_dflash.bench.trace import COSTS, TRACES, cost_table, record

    console = wide_console()
    cost_table(record(configure(options), console)).print(console)
    console.print(f"traces: {options.out / TRACES}; costs: {options.out / COSTS}")


@app.command()
@takes_options(
    without=(*_COMPARING, "modes", "tasks", "concurrency", "num_prompts", "builtin_shims", "data_dir"),
    num_prompts=8,
    repeats=1,
    out=Path("bench-profile"),
)
def profile(
    options: Options,
    mode: Annotated[str, typer.Option(help="The arm to profile.")] = "dflash:16",
    task: Annotated[str, typer.Option(help="Whose questions are asked meanwhile.")] = "math",
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Scheduler steps to record, prefills included.")] = 20,
) -> None:
    """Write a torch profiler trace of some steps, and print the time spent in each stage of our worker."""
    from sglang_dflash.bench.configure import configure
    from sglang_dflash.bench.profile import record, stage_table
    from sglang_dflash.bench.tables import wide_console

    console = wide_console()
    settings = configure(replace(options, modes=mode, tasks=task, concurrency=str(concurrency)))
    path = record(settings, steps, console)
    stage_table(path).print(console)
    console.print(f"trace: {path}; open it in ui.perfetto.dev")


@app.command()
def simulate(
    recording: Annotated[
        Path | None,
        typer.Argument(help="Results folder of a benchmark with an arm random:BLOCK, or a step log of random widths."),
    ] = None,
    cards: Annotated[bool, typer.Option("--cards", help="The published cards' cells instead of a recording.")] = False,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Requests in flight, for a step log; default: its largest batch.")
    ] = None,
    measured: Annotated[
        Path | None, typer.Option(help="JSON object of measured tok/s by arm, beside a step log's predictions.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 0,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")] = False,
) -> None:
    """Predict every block width, and the adaptive policy, from steps recorded with widths drawn at random."""
    with user_errors():
        from sglang_dflash.bench.simulate.command import simulated
        from sglang_dflash.bench.tables import wide_console

        console = wide_console()
        table = simulated(recording, cards, concurrency, measured, seed, console)
        if markdown:
            typer.echo(f"{table.markdown()}\n\n{table.caption}")
        else:
            table.print(console)
