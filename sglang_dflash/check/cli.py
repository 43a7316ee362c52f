"""``sglang-dflash check``: the preflight from the command line."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import Enum
from typing import Annotated

import typer

from sglang_dflash.check.findings import Finding, of_error
from sglang_dflash.check.flags import parse
from sglang_dflash.check.known_flags import check_unread
from sglang_dflash.check.preflight import Report, preflight
from sglang_dflash.errors import DFlashError
from sglang_dflash.memory.machine import GPUS, asked_about, size
from sglang_dflash.memory.table import lines
from sglang_dflash.plan.mix import Mix

Gpu = Enum("Gpu", {name: name for name in GPUS})  # type: ignore[misc]  # typer lists its values in --help
_COLOUR = {"ok": "green", "warn": "yellow", "error": "red"}
CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}


def check(
    flags: typer.Context,
    target: Annotated[str, typer.Argument(help="Target: directory or hub id.")],
    drafter: Annotated[str, typer.Argument(help="Drafter: directory or hub id.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    memory_gib: Annotated[
        float | None,
        typer.Option(help="Ask about another machine: a GPU with so many GiB, or with --device cpu a CPU."),
    ] = None,
    gpu: Annotated[Gpu | None, typer.Option(help="Ask about one of these GPUs, whatever this machine has.")] = None,
    users: Annotated[int | None, typer.Option(min=1, help="Requests that run at once: which flags serve them?")] = None,
    context: Annotated[int | None, typer.Option(min=1, help="Tokens of each, prompt and answer.")] = None,
    conversations: Annotated[int, typer.Option(min=0, help="Contexts that stay cached, running ones too.")] = 0,
) -> None:
    """Does the drafter fit the target, do both fit into memory, will these server flags work?

    Put the server's flags after the two models. Only configurations and safetensors headers are read.
    Exit status: 0 all well, 1 warnings, 2 errors.
    """
    if gpu and memory_gib is not None:
        raise typer.BadParameter("--gpu says how much memory there is: leave out --memory-gib")
    if (users is None) != (context is None):
        raise typer.BadParameter("--users and --context belong together")
    mix = Mix(users, context, conversations) if users and context else None
    found = _report(target, drafter, flags.args, memory_gib, gpu, mix)
    levels = {finding.level for finding in found.findings}
    exit_code = 2 if "error" in levels else 1 if "warn" in levels else 0
    if as_json:
        plan, memory = found.plan, found.memory
        shown = {
            "findings": [asdict(finding) for finding in found.findings],
            "plan": plan and plan.describe(),
            "memory": memory
            and asdict(memory) | {"ways": [asdict(pools) | {"bytes": pools.bytes} for pools in memory.ways]},
            "exit_code": exit_code,
        }
        typer.echo(json.dumps(shown, indent=2))
    else:
        show(found)
    raise typer.Exit(exit_code)


def _report(
    target: str, drafter: str, flags: list[str], memory_gib: float | None, gpu: Gpu | None, mix: Mix | None
) -> Report:
    try:
        args, notes, unread = parse(flags, target=target, drafter=drafter)
        machine = asked_about(args.device, memory_gib, gpu and gpu.value, base_gpu_id=args.base_gpu_id)
    except DFlashError as raised:
        return Report([of_error("flags", raised)])
    found = preflight(args, machine, mix)
    read = [Finding("ok", "old flag", note) for note in notes]
    return Report([*read, *check_unread(unread), *found.findings], found.plan)


def show(report: Report) -> None:
    """Print the findings, the plan, then the memory table.

    In plain lines: paths and flags stay whole, whatever the terminal's width.
    """
    for finding in report.findings:
        level = typer.style(f"{finding.level:<6}", fg=_COLOUR[finding.level])
        typer.echo(f"{level}{finding.about}: {finding.value}")
        if finding.level != "ok":
            typer.echo(f"      expected: {finding.expected}\n      remedy: {finding.remedy}")
    if report.plan is None:
        return
    typer.echo("\nPlan")
    for name, value in report.plan.describe().items():
        typer.echo(f"{name:<32}{', '.join(map(str, value)) if isinstance(value, list) else value}")
    if (memory := report.memory) is not None:
        static = f", {size(memory.static_bytes)} static" if memory.static_bytes else ""
        typer.echo(f"\nMemory of one rank ({memory.device}{static})")
        for line in lines(memory.ways, memory.advice, memory.outside, memory.prefixes):
            typer.echo(line)
