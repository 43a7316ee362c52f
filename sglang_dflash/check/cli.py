"""``sglang-dflash check``: the preflight from the command line."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from sglang_dflash.check.findings import of_error
from sglang_dflash.check.options import parse
from sglang_dflash.check.report import Report, preflight
from sglang_dflash.check.table import show
from sglang_dflash.errors import DFlashError
from sglang_dflash.memory.device import find_device

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}


def check(
    context: typer.Context,
    target: Annotated[str, typer.Argument(help="Target: directory or hub id.")],
    drafter: Annotated[str, typer.Argument(help="Drafter: directory or hub id.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    memory_gib: Annotated[
        float | None, typer.Option(help="Memory to divide, GiB; this machine's GPU where not given.")
    ] = None,
) -> None:
    """Does the drafter fit the target, do both fit into memory, will these server flags work?

    Put the server's flags behind the two models. Only configurations and safetensors headers are read.
    Exit status: 0 all well, 1 warnings, 2 errors.
    """
    report, window = _report(target, drafter, context.args, memory_gib)
    if as_json:
        typer.echo(report.as_json())
    else:
        show(report, Console(), window)
    raise typer.Exit(report.exit_code)


def _report(target: str, drafter: str, flags: list[str], memory_gib: float | None) -> tuple[Report, int | None]:
    try:
        args, notes, unread = parse(flags, target=target, drafter=drafter)
    except DFlashError as raised:
        return Report([of_error("flags", raised)], None), None
    report = preflight(args, device=find_device(), notes=notes, unread=unread, memory_gib=memory_gib)
    return report, args.speculative_draft_window_size
