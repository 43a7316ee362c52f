"""The memory table as lines of text: ``check`` predicts its numbers, a server reads them off its pools."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from sglang_dflash.plan.advice import Advice
from sglang_dflash.plan.machine import size
from sglang_dflash.plan.pools import Outside, Pools
from sglang_dflash.plan.rules import Report
from sglang_dflash.plan.settings import SLOTS

_ABOUT, _EACH, _WHOLE = 32, 22, 13  # columns of text


def to_json(report: Report, exit_code: int) -> dict[str, Any]:
    """What ``sglang-dflash check --json`` prints."""
    plan, memory = report.plan, report.memory
    return {
        "findings": [asdict(finding) for finding in report.findings],
        "plan": plan and plan.describe(),
        "memory": memory
        and asdict(memory)
        | {
            "ways": [asdict(pools) | {"bytes": pools.bytes} for pools in memory.ways],
            "advice": [asdict(each) for each in report.advice],
            "prefixes": [asdict(each) for each in report.prefixes],
        },
        "exit_code": exit_code,
    }


def plan_lines(report: Report) -> Iterator[str]:
    """The plan, then the memory table; nothing without a plan."""
    if (plan := report.plan) is None:
        return
    yield "\nPlan"
    for name, value in plan.describe().items():
        yield f"{name:<{_ABOUT}}{', '.join(map(str, value)) if isinstance(value, list) else value}"
    if (memory := plan.memory) is not None:
        static = f", {size(memory.static_bytes)} static" if memory.static_bytes else ""
        yield f"\nMemory of one rank ({memory.device}{static})"
        yield from lines(memory.ways, report.advice, memory.outside, report.prefixes)


def lines(
    ways: Sequence[Pools],
    advice: Sequence[Advice] = (),
    outside: Outside | None = None,
    prefixes: Sequence[Advice] = (),
) -> list[str]:
    """The table: what a unit takes and what the whole takes, side by side for each way to keep states.

    Args:
        ways: one or two, of the same pair; the one that is served comes first.
        advice, prefixes: of the first.
        outside: what the device holds beside them, the same for each way.
    """
    columns = [_column(pools) for pools in ways]
    rows_of_any = dict.fromkeys(about for column in columns for about in column)
    table = [(about, [column.get(about, ("", "")) for column in columns]) for about in rows_of_any]
    text = [(about.ljust(_ABOUT) + "".join(_cells(*cells) for cells in rows)).rstrip() for about, rows in table]
    if outside is not None:
        rows = {
            "outside: sampling": outside.sampling,
            f"outside: attention, {outside.sets} sets of graphs": outside.buffers,
            "left: activations, graphs": max(0, outside.left),
        }
        text += [about.ljust(_ABOUT) + _cells("", size(count)) for about, count in rows.items()]
    text += [f"more would fit with {each}" for each in advice]
    for each in prefixes:
        change = each.tokens - ways[0].tokens
        text.append(f"prefixes with {each.flag}: {each.prefixes}, tokens of K/V {change:+}")
    return text


def _column(pools: Pools) -> dict[str, tuple[str, str]]:
    """Two cells by what they are about; of memory that was not divided, the units alone."""
    whole = pools.bytes
    rows = [("target's weights", "", whole["target_weights"]), ("drafter's weights", "", whole["drafter_weights"])]
    heading, prefixes = {}, {}
    if pools.state:
        heading = {"states of a block": ("", "replayed" if pools.replay else "kept")}
        slots = pools.slots_per_request
        rows += [(f"recurrent states, {slots} slots", f"{size(slots * pools.state)} per request", whole["states"])]
        if pools.scratch:
            rows += [
                (f"verify scratch, block of {pools.block}", f"{size(pools.scratch)} per request", whole["scratch"])
            ]
        if slots > 1:
            fewer = {f"  with {name}": ("", str(pools.prefixes(each))) for name, each in SLOTS.items() if each < slots}
            prefixes = {
                "additional prefixes kept": ("", str(pools.prefixes())),
                **fewer,
                "  one more costs": (f"{pools.state_price} tokens of K/V", size(pools.state)),
                "  an evicted prefix costs": ("", "a full prefill"),
            }
    rows += [("target's K/V", f"{size(pools.target_kv)} per token", whole["target_kv"])]
    if pools.ring is None:
        rows += [("drafter's K/V", f"{size(pools.draft_kv)} per token", whole["draft_kv"])]
    else:
        each = f"{size(pools.ring * pools.draft_kv)} per request"
        rows += [(f"drafter's K/V, {pools.ring} slots", each, whole["draft_kv"])]
    if pools.history:
        rows += [("history, for copied blocks", f"{size(pools.history)} per request", whole["history"])]
    if pools.tokens == 0:
        return heading | {about: (each, "" if each else size(all_of_it)) for about, each, all_of_it in rows}
    totals = {
        "together": ("", size(sum(whole.values()))),
        "tokens of K/V": (f"{pools.tokens // max(1, pools.running)} per request", str(pools.tokens)),
        f"requests at once, of {pools.asked}": ("", str(pools.running)),
        "capped by": ("", pools.capped_by),
        **prefixes,
    }
    return heading | {about: (each, size(all_of_it)) for about, each, all_of_it in rows} | totals


def _cells(each: str, whole: str) -> str:
    return each.rjust(_EACH) + whole.rjust(_WHOLE) if each else whole.rjust(_EACH + _WHOLE)
