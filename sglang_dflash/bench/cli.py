"""`sglang-dflash bench` and `sglang-dflash report`: read the options and hand over.

What a command needs is imported when it runs, so that `sglang-dflash --help` works without the `bench` extra.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sglang_dflash.bench import options as o
from sglang_dflash.errors import DFlashError

if TYPE_CHECKING:
    from sglang_dflash.bench.settings import Settings

app = typer.Typer()
_INTERRUPTED = 130


@contextmanager
def _user_errors() -> Iterator[None]:
    try:
        yield
    except DFlashError as error:
        typer.echo(error, err=True)
        raise typer.Exit(2) from None
    except ModuleNotFoundError as error:
        typer.echo(f"{error}: pip install 'sglang-dflash[bench]'", err=True)
        raise typer.Exit(2) from None


@app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    pair: o.PairName = None,
    target: o.Target = None,
    draft: o.Draft = None,
    drafter: o.DrafterKind = "good",
    modes: o.Modes = "ar,dflash:8,dflash:16",
    tasks: o.Tasks = None,
    concurrency: o.Concurrency = "1,8",
    num_prompts: o.NumPrompts = 32,
    repeats: o.Repeats = 5,
    max_tokens: o.MaxTokens = None,
    temperature: o.Temperature = 0.0,
    thinking: o.Thinking = None,
    seed: o.Seed = 0,
    base_url: o.BaseUrl = None,
    one_at_a_time: o.OneAtATime = None,
    server_args: o.ServerArgs = "",
    builtin_shims: o.BuiltinShims = None,
    data_dir: o.DataDir = None,
    out: o.Out = Path("bench-results"),
) -> None:
    """Measure plain decoding against DFLASH and its peers on real servers, and print the cards' tables.

    Runs modes x concurrencies x tasks in alternating order, each answer checked. Ctrl-C keeps what was measured, and
    the same command goes on from there.
    """
    if context.invoked_subcommand is not None:
        return
    with _user_errors():
        from sglang_dflash.bench.configure import configure

        settings = configure(
            pair=pair, target=target, draft=draft, drafter=drafter, modes=modes, tasks=tasks,
            concurrency=concurrency, num_prompts=num_prompts, repeats=repeats, max_tokens=max_tokens,
            temperature=temperature, thinking=thinking, seed=seed, base_url=base_url, one_at_a_time=one_at_a_time,
            server_args=server_args, builtin_shims=builtin_shims, data_dir=data_dir, out=out,
        )  # fmt: skip
        interrupted = _measure(settings)
    raise typer.Exit(_INTERRUPTED if interrupted else 0)


def _measure(settings: Settings) -> bool:
    """Run the session and print its tables; -> whether it was interrupted."""
    from sglang_dflash.bench import results
    from sglang_dflash.bench.session import Session
    from sglang_dflash.bench.summary import Summary
    from sglang_dflash.bench.tables import all_tables, wide_console

    console = wide_console()
    interrupted = False
    try:
        Session(settings, console).run()
    except KeyboardInterrupt:
        interrupted = True
        console.print("interrupted: the tables show the runs that were finished")
    for table in all_tables(Summary(results.read_finished(settings.out))):
        table.print(console)
    console.print(f"raw results: {settings.out / results.FILE_NAME}; page: sglang-dflash report {settings.out}")
    return interrupted


def report(folder: o.ResultsFolder) -> None:
    """Write one self-contained HTML page, PNG figures and a CSV file into the results folder of a benchmark."""
    with _user_errors():
        from sglang_dflash.bench.report import write_report

        typer.echo(write_report(folder))


@app.command()
def trace(
    pair: o.PairName = None,
    target: o.Target = None,
    draft: o.Draft = None,
    drafter: o.DrafterKind = "good",
    modes: o.Modes = "dflash:4,dflash:8,dflash:16",
    tasks: o.Tasks = None,
    concurrency: o.Concurrency = "1,8",
    num_prompts: o.NumPrompts = 8,
    max_tokens: o.MaxTokens = None,
    base_url: o.BaseUrl = None,
    server_args: o.ServerArgs = "",
    builtin_shims: o.BuiltinShims = None,
    data_dir: o.DataDir = None,
    out: o.Out = Path("bench-trace"),
) -> None:
    """Record accept lengths and times of every step, and print what a step costs by width and concurrency."""
    with _user_errors():
        from sglang_dflash.bench.configure import configure
        from sglang_dflash.bench.tables import wide_console
        from sglang_dflash.bench.trace import COSTS, TRACES, cost_table, record

        settings = configure(
            pair=pair, target=target, draft=draft, drafter=drafter, modes=modes, tasks=tasks,
            concurrency=concurrency, num_prompts=num_prompts, max_tokens=max_tokens, base_url=base_url,
            server_args=server_args, builtin_shims=builtin_shims, data_dir=data_dir, out=out,
        )  # fmt: skip
        console = wide_console()
        cost_table(record(settings, console)).print(console)
        console.print(f"traces: {out / TRACES}; costs: {out / COSTS}")


@app.command()
def profile(
    pair: o.PairName = None,
    target: o.Target = None,
    draft: o.Draft = None,
    drafter: o.DrafterKind = "good",
    mode: Annotated[str, typer.Option(help="The arm to profile.")] = "dflash:16",
    task: Annotated[str, typer.Option(help="Whose questions are asked meanwhile.")] = "math",
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Scheduler steps to record, prefills included.")] = 20,
    max_tokens: o.MaxTokens = None,
    base_url: o.BaseUrl = None,
    server_args: o.ServerArgs = "",
    out: o.Out = Path("bench-profile"),
) -> None:
    """Write a torch profiler trace of some steps, and print the time spent in each stage of our worker."""
    with _user_errors():
        from sglang_dflash.bench.configure import configure
        from sglang_dflash.bench.profile import record, stage_table
        from sglang_dflash.bench.tables import wide_console

        settings = configure(
            pair=pair, target=target, draft=draft, drafter=drafter, modes=mode, tasks=task,
            concurrency=str(concurrency), num_prompts=8, max_tokens=max_tokens, base_url=base_url,
            server_args=server_args, out=out,
        )  # fmt: skip
        console = wide_console()
        path = record(settings, steps, console)
        stage_table(path).print(console)
        console.print(f"trace: {path}; open it in ui.perfetto.dev")
