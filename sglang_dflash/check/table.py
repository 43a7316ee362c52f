"""The preflight on a terminal, in plain lines: whatever the terminal's width, no path or flag is cut or split."""

from __future__ import annotations

import typer

from sglang_dflash.check.preflight import Report
from sglang_dflash.memory.table import lines
from sglang_dflash.memory.units import size

_COLOUR = {"ok": "green", "warn": "yellow", "error": "red"}


def show(report: Report) -> None:
    """Print the findings, then the memory table."""
    for finding in report.findings:
        level = typer.style(f"{finding.level:<6}", fg=_COLOUR[finding.level])
        typer.echo(f"{level}{finding.about}: {finding.value}")
        if finding.level != "ok":
            typer.echo(f"      expected: {finding.expected}\n      remedy: {finding.remedy}")
    memory = report.memory
    if memory is not None:
        static = f", {size(memory.static_bytes)} static" if memory.static_bytes else ""
        typer.echo(f"\nMemory of one rank ({memory.device}{static})")
        for line in lines(memory.ways, memory.advice):
            typer.echo(line)
