"""``sglang-dflash check``: the preflight from the command line."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import Enum
from typing import Annotated

import typer

from sglang_dflash.check.findings import Finding, of_error
from sglang_dflash.check.options import parse
from sglang_dflash.check.preflight import Report, preflight
from sglang_dflash.check.table import show
from sglang_dflash.errors import DFlashError
from sglang_dflash.memory.machine import GPUS, asked_about

Gpu = Enum("Gpu", {name: name for name in GPUS})  # type: ignore[misc]  # typer lists its values in --help
CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}


def check(
    context: typer.Context,
    target: Annotated[str, typer.Argument(help="Target: directory or hub id.")],
    drafter: Annotated[str, typer.Argument(help="Drafter: directory or hub id.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    memory_gib: Annotated[
        float | None,
        typer.Option(help="Ask about another machine: a GPU with so many GiB, or with --device cpu a CPU."),
    ] = None,
    gpu: Annotated[Gpu | None, typer.Option(help="Ask about one of these GPUs, whatever this machine has.")] = None,
) -> None:
    """Does the drafter fit the target, do both fit into memory, will these server flags work?

    Put the server's flags after the two models. Only configurations and safetensors headers are read.
    Exit status: 0 all well, 1 warnings, 2 errors.
    """
    if gpu and memory_gib is not None:
        raise typer.BadParameter("--gpu says how much memory there is: leave out --memory-gib")
    report = _report(target, drafter, context.args, memory_gib, gpu)
    levels = {finding.level for finding in report.findings}
    exit_code = 2 if "error" in levels else 1 if "warn" in levels else 0
    if as_json:
        typer.echo(json.dumps(asdict(report) | {"exit_code": exit_code}, indent=2))
    else:
        show(report)
    raise typer.Exit(exit_code)


def _report(target: str, drafter: str, flags: list[str], memory_gib: float | None, gpu: Gpu | None) -> Report:
    try:
        args, notes, unread = parse(flags, target=target, drafter=drafter)
        machine = asked_about(args.device, memory_gib, gpu and gpu.value)
    except DFlashError as raised:
        return Report([of_error("flags", raised)])
    report = preflight(args, machine)
    read = [Finding("ok", "old flag", note) for note in notes]
    if unread:
        read.append(Finding("ok", "flags not looked at", " ".join(unread)))
    return Report([*read, *report.findings], report.memory)
