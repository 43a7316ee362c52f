"""``sglang-dflash check``: the preflight of a command line, and its result: a verdict, a table or JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from sglang_dflash.check.advice import Advice, Adviser, Load
from sglang_dflash.check.memory import Headroom, MemoryTable, expected_memory
from sglang_dflash.check.pools import Pools
from sglang_dflash.check.rules import RUNNING, check_memory
from sglang_dflash.errors import DFlashError, Doubt, Finding, Level, judge
from sglang_dflash.plan.device import Device
from sglang_dflash.plan.division import size
from sglang_dflash.plan.pair import Pair
from sglang_dflash.plan.plan import decide, reason_for_builtin, widths_of
from sglang_dflash.plan.rules import check_plan, check_rules
from sglang_dflash.plan.serving import ServingPlan
from sglang_dflash.plan.settings import SLOTS, SWITCH, WINDOW_FLAG, Settings

TITLE = 72  # columns before the verdict
_ABOUT, _EACH, _WHOLE = 32, 22, 13  # columns of the table
_MARK = {"error": "x", "warn": "!", "note": "-"}
_NAMES = {"error": "error", "warn": "warning", "note": "note"}
_PRICES = {
    "--mamba-ssm-dtype": "rounds the target's states",
    "--speculative-num-draft-tokens": "shorter drafts",
    WINDOW_FLAG: "the drafter reads this many tokens",
    "--mamba-radix-cache-strategy": "fewer snapshots",
}


@dataclass(frozen=True)
class Report:
    """Findings in the order of the rules, and the plan unless an earlier finding stops the pair.

    ``advice`` are flags that would let more requests run.
    """

    findings: list[Finding]
    plan: ServingPlan | None = None
    memory: MemoryTable | None = None
    advice: Sequence[Advice] = ()


def preflight(settings: Settings, machine: Device, load: Load | None = None) -> Report:
    """Check a command line by the rules and decisions of a launch.

    Args:
        machine: what will serve.
        load: what it should hold at once; None if the user did not state it.
    """
    try:
        settings.validate()
        if settings.wants_builtin:
            raise Doubt(
                f"{SWITCH}=builtin: SGLang's own worker serves, and nothing is checked for it",
                expected=f"{SWITCH} unset",
                remedy=f"unset {SWITCH} to check this package's worker",
            )
        pair = Pair.of(settings)
    except DFlashError as error:
        return Report([Finding.of("settings", error)])
    findings = check_rules(settings, pair, machine)
    if not settings.speculative_draft_model_path or any(finding.level == "error" for finding in findings):
        return Report(findings)  # sizes of a pair that does not match mean nothing
    if pair.kind:
        return Report(findings)  # left to SGLang's own worker
    findings.append(judge("worker", _worker, settings, pair, machine))
    if findings[-1].level != "ok":
        return Report(findings)
    try:
        plan = decide(settings, pair, machine, hybrid=pair.hybrid)
    except DFlashError as error:
        return Report([*findings, Finding.of("flags", error)])
    findings += check_plan(plan)
    try:
        memory = expected_memory(settings, machine, pair, widths_of(settings, pair, plan.block), copies=plan.copies)
    except DFlashError as error:  # SGLang divides the memory, and may have better sizes
        return Report([*findings, replace(Finding.of("memory", error), estimated=True)], plan)
    findings += check_memory(memory)
    if not memory.static_bytes:
        return Report(findings, plan, memory)
    adviser = Adviser(settings, machine, pair, memory)
    if load is not None:
        about = f"{load.users} users of {load.context} tokens"
        finding = judge(about, _load, settings, machine, pair, memory, adviser, load)
        level: Level = "note" if finding.level == "ok" else finding.level  # it answers a question of the user
        findings.append(replace(finding, level=level, estimated=True))
    return Report(findings, plan, memory, adviser.more_requests())


def _worker(settings: Settings, pair: Pair, machine: Device) -> str:
    on_cpu = machine.kind == "cpu"
    served = replace(settings, device="cpu" if on_cpu else settings.device or "cuda")
    reason = reason_for_builtin(served, pair, on_cpu=on_cpu)
    if reason is None:
        return "sglang-dflash"
    raise Doubt(
        f"SGLang's own worker serves: {reason}",
        expected="arguments that this package's worker serves",
        remedy="none to serve it; memory is not checked for SGLang's own worker",
    )


def _load(settings: Settings, machine: Device, pair: Pair, memory: MemoryTable, adviser: Adviser, load: Load) -> str:
    served, contexts = memory.served, load.contexts_in(memory.served)
    if load.fits(served) and contexts >= load.conversations:
        return f"served; {contexts} contexts kept"
    if proposal := adviser.propose(load):
        remedy = f"set {proposal}"
    else:
        remedy = "nothing serves them here"
        if (largest := adviser.largest(load)) is not None:
            remedy += f": at most {largest.pools.running} users with {largest}"
        for flag, changed in (
            (f"--tp-size {2 * settings.tp_size}", replace(settings, tp_size=2 * settings.tp_size)),
            ("--kv-cache-dtype fp8_e4m3", replace(settings, kv_cache_dtype="fp8_e4m3")),
        ):
            if wider := Adviser(changed, machine, pair, memory).propose(load):
                remedy += f"; or {flag} {wider}"
    wanted = f"{load.users} at once, {max(load.users, load.conversations) * load.context:,} tokens of K/V"
    raise Doubt(
        f"{served.running} at once, with {served.tokens:,} tokens of K/V in total; {contexts} contexts kept",
        expected=f"{wanted}, {load.conversations} contexts kept" if load.conversations else wanted,
        remedy=remedy,
    )


def to_json(report: Report, exit_code: int) -> dict[str, Any]:
    """Return what ``sglang-dflash check --json`` prints."""
    plan, memory = report.plan, report.memory
    return {
        "findings": [asdict(finding) for finding in report.findings],
        "plan": plan and plan.describe(),
        "memory": memory
        and asdict(memory)
        | {
            "served": _pools_json(memory.served),
            "other": memory.other and _pools_json(memory.other),
            "advice": [asdict(each) for each in report.advice],
        },
        "exit_code": exit_code,
    }


def _pools_json(pools: Pools) -> dict[str, Any]:
    return asdict(pools) | {"bytes": pools.bytes, "capped_by": pools.capped_by, "prefixes": pools.prefixes()}


def verdict(report: Report) -> str:
    """Return whether the pair can be served here, in a few words."""
    errors = sum(finding.level == "error" for finding in report.findings)
    memory = report.memory
    if memory is not None and memory.static_bytes and not memory.served.running:
        return "DOES NOT FIT"
    if errors:
        return f"REFUSED: {errors} error{'s' if errors > 1 else ''}"
    if report.plan is None:
        return "SGLANG'S OWN WORKER SERVES"
    if memory is None or not memory.static_bytes:
        return "COMPATIBLE: memory unknown"
    return f"FITS: {memory.served.running} of {memory.served.sizing.max_running} requests at once"


def summary(report: Report, title: str, command: str) -> Iterator[str]:
    """Yield the verdict, the plan, the division of the memory, what is wrong, and the command to start.

    Args:
        title: the pair and the machine.
        command: that starts the server.
    """
    yield f"{title:{TITLE}} {verdict(report)}"
    memory = report.memory
    if report.plan is not None:
        yield f"  {plan_in_short(report.plan, recurrent=memory is not None and memory.other is not None)}"
    if memory is not None and memory.served.tokens:
        yield f"  {', '.join(division_in_short(memory.served, memory.headroom))}"
    others = [finding for finding in report.findings if finding.level != "ok"]
    for finding in others:
        yield f"\n  {_MARK[finding.level]} {finding.about}: {finding.value}"
        if finding.about == RUNNING and report.advice:
            yield from _advice_rows(report.advice)
        elif finding.level != "note":
            yield f"      Fix: {finding.remedy}"
    counts = Counter[str](finding.level for finding in report.findings)
    found = [f"{n} {name}{'s' if n > 1 else ''}" for level, name in _NAMES.items() if (n := counts[level])]
    yield "\n" + ", ".join([f"{counts['ok']} checks passed (-v lists them)", *found]) + "."
    if not counts["error"]:
        yield f"Start: {command}"


def plan_in_short(plan: ServingPlan, *, recurrent: bool) -> str:
    width = "fixed width" if plan.widths is None else "adaptive width"
    states = [f"states {'replayed' if plan.replay else 'kept'}"] if recurrent else []
    return ", ".join([f"block {plan.block}", width, "copied blocks" if plan.copies else "no copies", *states])


def division_in_short(pools: Pools, headroom: Headroom | None = None) -> Iterator[str]:
    yield f"K/V {pools.tokens:,} tokens ({pools.tokens // max(1, pools.running):,} per request)"
    if pools.state.slot and pools.sizing.slots_per_request > 1:
        yield f"{pools.prefixes():,} cached prefixes"
    if headroom is not None:
        yield f"{size(max(0, headroom.left)) or 'nothing'} left for activations and graphs"


def _advice_rows(advice: Sequence[Advice]) -> Iterator[str]:
    rows = [(each.flag, f"{each.running:,} requests", f"{each.tokens:,} tokens") for each in advice]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for flag, requests, tokens in rows:
        price = next((price for name, price in _PRICES.items() if flag.startswith(name)), "")
        yield f"      {flag:{widths[0]}}   {requests:>{widths[1]}}   {tokens:>{widths[2]}}   {price}".rstrip()


def plan_lines(report: Report) -> Iterator[str]:
    """Yield the plan, then the memory table; nothing without a plan."""
    if (plan := report.plan) is None:
        return
    yield "\nPlan"
    for name, value in plan.describe().items():
        yield f"{name:<{_ABOUT}}{', '.join(map(str, value)) if isinstance(value, list) else value}"
    if (memory := report.memory) is not None:
        static = f", {size(memory.static_bytes)} static" if memory.static_bytes else ""
        yield f"\nMemory of one rank ({memory.device}{static})"
        yield from lines(memory.served, memory.other, report.advice, memory.headroom)


def lines(
    served: Pools,
    other: Pools | None = None,
    advice: Sequence[Advice] = (),
    headroom: Headroom | None = None,
) -> list[str]:
    """Return the memory table: per unit and in total, with one column for each way to store states."""
    columns = [_column(pools) for pools in (served, other) if pools is not None]
    rows_of_any = dict.fromkeys(about for column in columns for about in column)
    table = [(about, [column.get(about, ("", "")) for column in columns]) for about in rows_of_any]
    text = [(about.ljust(_ABOUT) + "".join(_cells(*cells) for cells in rows)).rstrip() for about, rows in table]
    if headroom is not None:
        rows = {
            "outside: sampling": headroom.sampling,
            f"outside: attention, {headroom.sets} sets of graphs": headroom.buffers,
            "outside: block that graphs inject": headroom.staged,
            "left: activations, graphs": max(0, headroom.left),
        }
        text += [about.ljust(_ABOUT) + _cells("", size(count)) for about, count in rows.items()]
    return text + [
        f"more would fit with {each.flag} ({each.running} requests, {each.tokens:,} tokens of K/V)" for each in advice
    ]


def _column(pools: Pools) -> dict[str, tuple[str, str]]:
    """Return two cells per row, per unit and in total; without totals if no memory was divided."""
    whole, sizing, state = pools.bytes, pools.sizing, pools.state
    rows = [("target's weights", "", whole["target_weights"]), ("drafter's weights", "", whole["drafter_weights"])]
    heading, prefixes, slots = {}, {}, sizing.slots_per_request
    if state.slot:
        heading = {"states of a block": ("", "replayed" if pools.replay else "kept")}
        rows += [(f"recurrent states, {slots} slots", f"{size(slots * state.slot)} per request", whole["states"])]
        if state.scratch:
            each = f"{size(state.scratch)} per request"
            rows += [(f"verify scratch, block of {sizing.block}", each, whole["scratch"])]
        if slots > 1:
            fewer = {f"  with {name}": ("", str(pools.prefixes(each))) for name, each in SLOTS.items() if each < slots}
            prefixes = {
                "additional prefixes kept": ("", str(pools.prefixes())),
                **fewer,
                "  one more costs": (f"{pools.state_price:,} tokens of K/V", size(state.slot)),
                "  an evicted prefix costs": ("", "a full prefill"),
            }
    rows += [("target's K/V", f"{size(sizing.target_kv)} per token", whole["target_kv"])]
    if sizing.ring is None:
        rows += [("drafter's K/V", f"{size(sizing.draft_kv)} per token", whole["draft_kv"])]
    else:
        each = f"{size(sizing.ring * sizing.draft_kv)} per request"
        rows += [(f"drafter's K/V, {sizing.ring} slots", each, whole["draft_kv"])]
    if pools.history:
        rows += [("history, for copied blocks", f"{size(pools.history)} per request", whole["history"])]
    if pools.tokens == 0:
        return heading | {about: (each, "" if each else size(total)) for about, each, total in rows}
    totals = {
        "together": ("", size(sum(whole.values()))),
        "tokens of K/V": (f"{pools.tokens // max(1, pools.running):,} per request", f"{pools.tokens:,}"),
        f"requests at once, of {sizing.max_running}": ("", str(pools.running)),
        "capped by": ("", pools.capped_by),
        **prefixes,
    }
    return heading | {about: (each, size(total)) for about, each, total in rows} | totals


def _cells(each: str, whole: str) -> str:
    return each.rjust(_EACH) + whole.rjust(_WHOLE) if each else whole.rjust(_EACH + _WHOLE)
