"""The preflight of ``sglang-dflash check``, and its output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from sglang_dflash.check.advice import Advice, Adviser, Load
from sglang_dflash.check.flags import check_flags, check_linear_backends
from sglang_dflash.check.memory import MemoryTable, expected_memory, unknown_size
from sglang_dflash.check.pools import Pools
from sglang_dflash.errors import DFlashError, Finding, apply, error, note, ok, warn
from sglang_dflash.plan.choice import left_untouched, reason_for_builtin
from sglang_dflash.plan.device import Device
from sglang_dflash.plan.division import TOKENS_PER_REQUEST, size
from sglang_dflash.plan.exact import check_exact
from sglang_dflash.plan.pair import Pair
from sglang_dflash.plan.rules import check_rules
from sglang_dflash.plan.serving import ServingPlan, decide
from sglang_dflash.plan.settings import SLOTS, SWITCH, WINDOW_FLAG, Settings

TITLE = 72  # columns before the verdict
_RUNNING, _LENGTH = "running requests", "tokens per request"
MIN_LENGTH = 2048  # for a prompt and a short answer
_ABOUT = 36  # columns before a value
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
    findings: list[Finding]
    plan: ServingPlan | None = None
    memory: MemoryTable | None = None
    advice: Sequence[Advice] = ()


def preflight(settings: Settings, machine: Device, load: Load | None = None) -> Report:
    first = apply("settings", _is_checked, settings)
    if first.level != "ok":
        return Report([first])
    pair = Pair.of(settings)
    left = apply("configuration", _left, settings, pair, machine)
    if left.level != "ok":
        return Report([left])
    findings = [
        *check_rules(settings, pair, machine),
        *check_linear_backends(settings, machine, torch.version.cuda),
        *check_flags(settings, pair, machine),
    ]
    if any(finding.level == "error" for finding in findings):
        return Report(findings)  # sizes of a mismatched pair mean nothing
    if pair.kind:
        return Report(findings)  # left to SGLang's own worker
    findings.append(apply("worker", _worker, settings, pair, machine))
    if findings[-1].level != "ok":
        return Report(findings)
    try:
        plan = decide(settings, pair, machine, hybrid=pair.hybrid)
    except DFlashError as refused:
        return Report([*findings, Finding.of(refused, "flags")])
    findings += check_exact(plan)
    if unknown := unknown_size(pair):
        return Report([*findings, replace(unknown, about="memory")], plan)
    try:
        memory = expected_memory(settings, machine, pair, copies=plan.copies)
    except DFlashError as refused:  # SGLang may have better sizes
        return Report([*findings, replace(Finding.of(refused, "memory"), estimated=True)], plan)
    if not memory.static_bytes:
        here = "no GPU here; use --gpu or --memory-gib to check another machine"
        return Report([*findings, Finding("ok", here, about=_RUNNING)], plan, memory)
    if memory.weighed:
        findings.append(replace(_weights(memory), about="weights"))
    findings.append(replace(_running(settings, memory), about=_RUNNING, estimated=True))
    findings.append(replace(_tokens(memory.served), about=_LENGTH, estimated=True))
    adviser = Adviser(settings, machine, pair, memory)
    if load is not None:
        about = f"{load.users} users of {load.context} tokens"
        answer = apply(about, _load, settings, machine, pair, memory, adviser, load.share(settings.groups))
        findings.append(replace(answer, estimated=True))
    return Report(findings, plan, memory, adviser.more_requests())


def _is_checked(settings: Settings) -> Finding:
    settings.validate()
    _ = settings.overrides
    if settings.wants_builtin:
        return warn(
            f"{SWITCH}=builtin: SGLang's own worker serves, and nothing is checked for it",
            expected=f"{SWITCH} unset",
            remedy=f"unset {SWITCH} to check this package's worker",
        )
    return ok("read")


def _left(settings: Settings, pair: Pair, machine: Device) -> Finding:
    if reason := left_untouched(settings, pair, machine):
        return _others(reason)
    return ok("ours")


def _weights(memory: MemoryTable) -> Finding:
    weights, static, fraction = memory.served.sizing.weights, memory.static_bytes, memory.fraction
    if weights < static:
        return ok(f"{size(weights)} of {size(static)}")
    wider = f"--mem-fraction-static {memory.highest}, " if weights * fraction < static * memory.highest else ""
    return error(
        f"the weights of one rank take {size(weights)}, and static memory is {size(static)} ({fraction} of the device)",
        expected="static memory that holds the weights and leaves room for K/V",
        remedy=f"set {wider}a larger --tp-size, or serve a quantised target (FP8)",
    )


def _running(settings: Settings, memory: MemoryTable) -> Finding:
    served, wanted = memory.served, memory.served.sizing.max_running
    if served.running >= wanted:
        return ok(f"{wanted} at once, with {served.tokens:,} tokens of K/V in total")
    if served.running == 0:
        slots, share = served.sizing.slots_per_request, f"their share holds {served.state_slots}"
        few = f": one request takes {slots} recurrent states, {share}" if 0 < served.state_slots < slots else ""
        static = f"{size(memory.static_bytes)} of static memory ({memory.fraction} of the device)"
        return error(
            f"no request fits into the {static}{few}",
            expected=f"more than {size(served.sizing.weights)}, the weights, and one request",
            remedy=f"use more GPUs (--tp-size), a quantised target, or --mem-fraction-static up to {memory.highest}",
        )
    level = warn if settings.max_running_requests else note  # otherwise the number is SGLang's default
    return level(
        f"{served.running} of {wanted} requests (--max-running-requests) fit at once, with {served.tokens:,} tokens of "
        f"K/V in total; the limit: {served.capped_by}",
        expected=f"memory for {wanted} requests; limited by {served.capped_by}",
        remedy="use more or larger GPUs, or accept the smaller number",
    )


def _tokens(pools: Pools) -> Finding:
    least, fits = min(MIN_LENGTH, pools.sizing.context), pools.requests_of(MIN_LENGTH)
    if not pools.running or pools.tokens >= least * pools.running:
        return ok(_lengths(pools))
    return warn(
        f"{pools.tokens // pools.running:,} tokens of K/V per request: {_lengths(pools)}",
        expected=f"{least:,} tokens or more: a request that finds none is retracted and prefilled again",
        remedy=f"set --max-running-requests {max(1, pools.requests_of(TOKENS_PER_REQUEST))}"
        + ("" if fits else ", more GPUs (--tp-size) or a quantised target"),
    )


def _lengths(pools: Pools) -> str:
    short, long = pools.requests_of(MIN_LENGTH), pools.requests_of(TOKENS_PER_REQUEST)
    return f"{short:,} requests at {MIN_LENGTH:,} tokens, {long:,} at {TOKENS_PER_REQUEST:,}"


def _worker(settings: Settings, pair: Pair, machine: Device) -> Finding:
    reason = reason_for_builtin(settings, pair, machine)
    return ok("sglang-dflash") if reason is None else _others(reason)


def _others(reason: str) -> Finding:
    return warn(
        f"SGLang's own worker serves: {reason}",
        expected="arguments that this package's worker serves",
        remedy="none to serve it; memory is not checked for SGLang's own worker",
    )


def _load(
    settings: Settings, machine: Device, pair: Pair, memory: MemoryTable, adviser: Adviser, load: Load
) -> Finding:
    served, contexts = memory.served, load.contexts_in(memory.served)
    if load.fits(served) and contexts >= load.conversations:
        return note(f"the load is served; {contexts} contexts are kept")  # answers the user's question
    if proposal := adviser.propose(load):
        remedy = f"set {proposal}"
    else:
        remedy = "nothing serves them here"
        if (largest := adviser.largest(load)) is not None:
            remedy += f": at most {largest.pools.running} users with {largest}"
        for flag, changed in (
            (f"--tp-size {2 * settings.tp_size}", settings.changed(tp_size=2 * settings.tp_size)),
            ("--kv-cache-dtype fp8_e4m3", settings.changed(kv_cache_dtype="fp8_e4m3")),
        ):
            if wider := Adviser(changed, machine, pair, memory).propose(load):
                remedy += f"; or {flag} {wider}"
    wanted = f"{load.users} at once, {max(load.users, load.conversations) * load.context:,} tokens of K/V"
    return warn(
        f"{served.running} requests run at once, with {served.tokens:,} tokens of K/V; {contexts} contexts are kept",
        expected=f"{wanted}, {load.conversations} contexts kept" if load.conversations else wanted,
        remedy=remedy,
    )


def to_json(report: Report, exit_code: int) -> dict[str, Any]:
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
    if any(finding.about == _LENGTH and finding.level == "warn" for finding in report.findings):
        return f"SHORT OF K/V: {_lengths(memory.served)}"
    return f"FITS: {memory.served.running} of {memory.served.sizing.max_running} requests at once"


def summary(report: Report, title: str, command: str) -> Iterator[str]:
    yield f"{title:{TITLE}} {verdict(report)}"
    memory = report.memory
    if report.plan is not None:
        yield f"  {plan_summary(report.plan, recurrent=memory is not None and memory.other is not None)}"
    if memory is not None and memory.served.tokens:
        yield f"  {', '.join(division_summary(memory.served))}"
    others = [finding for finding in report.findings if finding.level != "ok"]
    for finding in others:
        yield f"\n  {_MARK[finding.level]} {finding.about}: {finding.value}"
        if finding.about == _RUNNING and report.advice:
            yield from _advice_rows(report.advice)
        elif finding.level != "note":
            yield f"      Fix: {finding.remedy}"
    counts = Counter[str](finding.level for finding in report.findings)
    found = [f"{n} {name}{'s' if n > 1 else ''}" for level, name in _NAMES.items() if (n := counts[level])]
    yield "\n" + ", ".join([f"{counts['ok']} checks passed (-v lists them)", *found]) + "."
    if not counts["error"]:
        yield f"Start: {command}"


def plan_summary(plan: ServingPlan, *, recurrent: bool) -> str:
    width = "fixed width" if plan.widths is None else "adaptive width"
    states = [f"states {'replayed' if plan.replay else 'kept'}"] if recurrent else []
    return ", ".join([f"block {plan.block}", width, "copied blocks" if plan.copies else "no copies", *states])


def division_summary(pools: Pools) -> Iterator[str]:
    lengths = f"; {_lengths(pools)}" if pools.requests_of(TOKENS_PER_REQUEST) < pools.running else ""
    yield f"K/V {pools.tokens:,} tokens ({pools.tokens // max(1, pools.running):,} per request{lengths})"
    if pools.state.slot and pools.sizing.slots_per_request > 1:
        yield f"{pools.prefixes():,} cached prefixes"


def _advice_rows(advice: Sequence[Advice]) -> Iterator[str]:
    rows = [(each.flag, f"{each.running:,} requests", f"{each.tokens:,} tokens") for each in advice]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for flag, requests, tokens in rows:
        price = next((price for name, price in _PRICES.items() if flag.startswith(name)), "")
        yield f"      {flag:{widths[0]}}   {requests:>{widths[1]}}   {tokens:>{widths[2]}}   {price}".rstrip()


def plan_lines(report: Report) -> Iterator[str]:
    if (plan := report.plan) is None:
        return
    yield "\nPlan"
    for name, value in plan.describe().items():
        yield _row(name, ", ".join(map(str, value)) if isinstance(value, list) else value)
    if (memory := report.memory) is None:
        return
    static = f", {size(memory.static_bytes)} static" if memory.static_bytes else ""
    yield f"\nMemory of one rank ({memory.device}{static})"
    yield from _memory_rows(memory.served)
    if (other := memory.other) is not None and memory.static_bytes:
        how = "replayed" if other.replay else "kept"
        yield _row(f"if states were {how}", f"{other.running} requests at once, {other.tokens:,} tokens of K/V")


def _row(name: str, value: object) -> str:
    return f"{name:<{_ABOUT}}{value}"


def _memory_rows(pools: Pools) -> Iterator[str]:
    whole, sizing, state, slots = pools.bytes, pools.sizing, pools.state, pools.sizing.slots_per_request

    def share(name: str, total: int, each: int, unit: str) -> str:
        return _row(name, f"{size(total)} ({size(each)} per {unit})" if pools.tokens else f"{size(each)} per {unit}")

    yield _row("target's weights", size(whole["target_weights"]))
    yield _row("drafter's weights", size(whole["drafter_weights"]))
    if state.slot:
        yield _row("states of a block", "replayed" if pools.replay else "kept")
        yield share(f"recurrent states, {slots} slots", whole["states"], slots * state.slot, "request")
    if state.scratch:
        yield share(f"verify scratch, block of {sizing.block}", whole["scratch"], state.scratch, "request")
    yield share("target's K/V", whole["target_kv"], sizing.target_kv, "token")
    if sizing.ring is None:
        yield share("drafter's K/V", whole["draft_kv"], sizing.draft_kv, "token")
    else:
        each = sizing.ring * sizing.draft_kv
        yield share(f"drafter's K/V, {sizing.ring} slots", whole["draft_kv"], each, "request")
    if pools.history:
        yield share("history, for copied blocks", whole["history"], pools.history, "request")
    if pools.tokens == 0:
        return
    yield _row("together", size(sum(whole.values())))
    yield _row("tokens of K/V", f"{pools.tokens:,} ({pools.tokens // max(1, pools.running):,} per request)")
    yield _row(f"requests at once, of {sizing.max_running}", f"{pools.running}, capped by {pools.capped_by}")
    if state.slot and slots > 1:
        fewer = [f"{pools.prefixes(each)} with {name}" for name, each in SLOTS.items() if each < slots]
        yield _row("additional prefixes kept", ", ".join([str(pools.prefixes()), *fewer]))
        price = f"{size(state.slot)}, as {pools.state_price:,} tokens of K/V; an evicted one a full prefill"
        yield _row("one more prefix costs", price)
