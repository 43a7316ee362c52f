"""The preflight on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sglang_dflash.check.findings import Finding
from sglang_dflash.check.report import MemoryTable, Report
from sglang_dflash.memory.fit import GIB
from sglang_dflash.window.size import ring_slots

_STYLE = {"ok": "green", "warn": "yellow", "error": "bold red"}
_MIB = 1 << 20
WINDOW = 2048  # of the example row, where no window was asked for


def show(report: Report, console: Console, window: int | None) -> None:
    """Print the findings, then the memory table.

    Args:
        window: ``--speculative-draft-window-size``, tokens.
    """
    table = Table(title="Preflight", title_justify="left")
    for column in ("", "looked at", "found"):
        table.add_column(column, overflow="fold")
    for finding in report.findings:
        style = _STYLE[finding.level]
        table.add_row(f"[{style}]{finding.level}[/]", escape(finding.about), _found(finding))
    console.print(table)
    if report.memory is not None:
        console.print(_memory(report.memory, window))


def _found(finding: Finding) -> str:
    if finding.level == "ok":
        return escape(finding.value)
    return escape(f"{finding.value}\nexpected: {finding.expected}\nremedy: {finding.remedy}")


def _memory(memory: MemoryTable, window: int | None) -> Table:
    demand, fit = memory.demand, memory.fit
    table = Table(title=f"Memory of one rank ({memory.device})", title_justify="left")
    for column, justify in (("what", "left"), ("takes", "right"), ("allocated", "right")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    table.add_row("target's weights", _size(demand.target_weights), "")
    table.add_row("drafter's weights", _size(demand.drafter_weights), _size(fit.weights))
    table.add_row("target's K/V, one token", _size(demand.target_kv), _size(fit.target_kv))
    table.add_row("drafter's K/V, one token", _size(demand.draft_kv), _size(fit.draft_kv))
    rows = demand.ring or ring_slots(WINDOW, block=demand.block, page=demand.page, context=WINDOW)
    label = f"drafter's K/V, one request with a draft window of {window or WINDOW}"
    table.add_row(label, _size(rows * demand.draft_kv), "")
    if demand.state.slot:
        slots = demand.slots_per_request
        table.add_row(
            f"recurrent state, one request ({slots} slots)", _size(slots * demand.state.slot), _size(fit.states)
        )
        table.add_row(
            f"verify scratch, one request (block {demand.block})",
            _size(demand.state.scratch(demand.block)),
            _size(fit.scratch),
        )
    if memory.static_bytes:
        table.add_row("tokens of K/V", "", str(fit.tokens))
        table.add_row("requests at once", f"{demand.max_running} asked", str(fit.running))
        used = fit.weights + fit.target_kv + fit.draft_kv + fit.states + fit.scratch
        table.add_row("together", f"of {_size(memory.static_bytes)} static", _size(used))
    return table


def _size(count: int) -> str:
    """Bytes as a person reads them; nothing for none."""
    if count >= GIB:
        return f"{count / GIB:.2f} GiB"
    if count >= _MIB:
        return f"{count / _MIB:.1f} MiB"
    return f"{count / 1024:.1f} KiB" if count else ""
