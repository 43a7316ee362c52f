"""The preflight on a terminal, in plain lines: whatever the terminal's width, no path or flag is cut or split."""

from __future__ import annotations

import typer

from sglang_dflash.check.preflight import MemoryTable, Report
from sglang_dflash.memory.machine import GIB
from sglang_dflash.window.size import ring_slots

_COLOUR = {"ok": "green", "warn": "yellow", "error": "red"}
_MIB = 1 << 20
WINDOW = 2048  # of the example row, if no window was asked for


def show(report: Report, window: int | None) -> None:
    """Print the findings, then the memory table.

    Args:
        window: ``--speculative-draft-window-size``, tokens.
    """
    for finding in report.findings:
        level = typer.style(f"{finding.level:<6}", fg=_COLOUR[finding.level])
        typer.echo(f"{level}{finding.about}: {finding.value}")
        if finding.level != "ok":
            typer.echo(f"      expected: {finding.expected}\n      remedy: {finding.remedy}")
    if report.memory is not None:
        typer.echo(f"\nMemory of one rank ({report.memory.device})")
        for what, takes, allocated in (("", "takes", "allocated"), *_rows(report.memory, window)):
            typer.echo(f"{what:<58}{takes:>10}{allocated:>11}".rstrip())


def _rows(memory: MemoryTable, window: int | None) -> list[tuple[str, str, str]]:
    demand, fit = memory.demand, memory.fit
    ring = demand.ring or ring_slots(WINDOW, block=demand.block, page=demand.page, context=WINDOW)
    rows = [
        ("target's weights", _size(demand.target_weights), ""),
        ("drafter's weights", _size(demand.drafter_weights), _size(fit.weights)),
        ("target's K/V, one token", _size(demand.target_kv), _size(fit.target_kv)),
        ("drafter's K/V, one token", _size(demand.draft_kv), _size(fit.draft_kv)),
        (f"drafter's K/V, one request with a draft window of {window or WINDOW}", _size(ring * demand.draft_kv), ""),
    ]
    if demand.state.slot:
        slots, scratch = demand.slots_per_request, demand.state.scratch(demand.block)
        rows += [
            (f"recurrent state, one request ({slots} slots)", _size(slots * demand.state.slot), _size(fit.states)),
            (f"verify scratch, one request (block {demand.block})", _size(scratch), _size(fit.scratch)),
        ]
    if memory.static_bytes:
        used = fit.weights + fit.target_kv + fit.draft_kv + fit.states + fit.scratch
        rows += [
            ("tokens of K/V", "", str(fit.tokens)),
            (f"requests at once, {demand.max_running} asked for", "", str(fit.running)),
            (f"together, of {_size(memory.static_bytes)} static", "", _size(used)),
        ]
    return rows


def _size(count: int) -> str:
    """Bytes as a person reads them; nothing for none."""
    if count >= GIB:
        return f"{count / GIB:.2f} GiB"
    if count >= _MIB:
        return f"{count / _MIB:.1f} MiB"
    return f"{count / 1024:.1f} KiB" if count else ""
