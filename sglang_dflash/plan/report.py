"""``sglang-dflash check``: the preflight of a command line, and its result as JSON or as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from sglang_dflash.errors import DFlashError, Doubt, Finding, judge
from sglang_dflash.plan.advice import Advice, Adviser, Load
from sglang_dflash.plan.machine import Machine, size
from sglang_dflash.plan.memory import Headroom, MemoryTable
from sglang_dflash.plan.pair import Pair
from sglang_dflash.plan.plan import decide, reason_for_builtin
from sglang_dflash.plan.pools import Pools
from sglang_dflash.plan.rules import check_memory, check_rules
from sglang_dflash.plan.serving import ServingPlan
from sglang_dflash.plan.settings import SLOTS, SWITCH, Settings

_ABOUT, _EACH, _WHOLE = 32, 22, 13  # columns of text


@dataclass(frozen=True)
class Report:
    """Findings in the order of the rules, and the plan unless an earlier finding stops the pair.

    Attributes:
        advice: flags that would let more requests run.
        prefixes: flags that would keep more prefixes, or K/V for them.
    """

    findings: list[Finding]
    plan: ServingPlan | None = None
    advice: Sequence[Advice] = ()
    prefixes: Sequence[Advice] = ()

    @property
    def memory(self) -> MemoryTable | None:
        return None if self.plan is None else self.plan.memory


def preflight(settings: Settings, machine: Machine, load: Load | None = None) -> Report:
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
    if plan.memory is None or not plan.memory.static_bytes:
        return Report([*findings, *check_memory(plan)], plan)
    adviser = Adviser(settings, machine, pair, plan.memory)
    advice = adviser.more_requests()
    findings += check_memory(plan, advice)
    if load is not None:
        about = f"{load.users} users of {load.context} tokens"
        finding = judge(about, _load, settings, machine, pair, plan.memory, adviser, load)
        findings.append(replace(finding, estimated=True))
    return Report(findings, plan, advice, adviser.more_prefixes())


def _worker(settings: Settings, pair: Pair, machine: Machine) -> str:
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


def _load(settings: Settings, machine: Machine, pair: Pair, memory: MemoryTable, adviser: Adviser, load: Load) -> str:
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
    wanted = f"{load.users} at once, {max(load.users, load.conversations) * load.context} tokens of K/V"
    raise Doubt(
        f"{served.running} at once, with {served.tokens} tokens of K/V in total; {contexts} contexts kept",
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
            "prefixes": [asdict(each) for each in report.prefixes],
        },
        "exit_code": exit_code,
    }


def _pools_json(pools: Pools) -> dict[str, Any]:
    return asdict(pools) | {"bytes": pools.bytes, "capped_by": pools.capped_by}


def plan_lines(report: Report) -> Iterator[str]:
    """Yield the plan, then the memory table; nothing without a plan."""
    if (plan := report.plan) is None:
        return
    yield "\nPlan"
    for name, value in plan.describe().items():
        yield f"{name:<{_ABOUT}}{', '.join(map(str, value)) if isinstance(value, list) else value}"
    if (memory := plan.memory) is not None:
        static = f", {size(memory.static_bytes)} static" if memory.static_bytes else ""
        yield f"\nMemory of one rank ({memory.device}{static})"
        yield from lines(memory.served, memory.other, report.advice, memory.headroom, report.prefixes)


def lines(
    served: Pools,
    other: Pools | None = None,
    advice: Sequence[Advice] = (),
    headroom: Headroom | None = None,
    prefixes: Sequence[Advice] = (),
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
            "left: activations, graphs": max(0, headroom.left),
        }
        text += [about.ljust(_ABOUT) + _cells("", size(count)) for about, count in rows.items()]
    text += [
        f"more would fit with {each.flag} ({each.running} requests, {each.tokens} tokens of K/V)" for each in advice
    ]
    for each in prefixes:
        change = each.tokens - served.tokens
        text.append(f"prefixes with {each.flag}: {each.prefixes}, tokens of K/V {change:+}")
    return text


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
                "  one more costs": (f"{pools.state_price} tokens of K/V", size(state.slot)),
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
        "tokens of K/V": (f"{pools.tokens // max(1, pools.running)} per request", str(pools.tokens)),
        f"requests at once, of {sizing.max_running}": ("", str(pools.running)),
        "capped by": ("", pools.capped_by),
        **prefixes,
    }
    return heading | {about: (each, size(total)) for about, each, total in rows} | totals


def _cells(each: str, whole: str) -> str:
    return each.rjust(_EACH) + whole.rjust(_WHOLE) if each else whole.rjust(_EACH + _WHOLE)
