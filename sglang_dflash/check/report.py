"""The preflight of ``sglang-dflash check``, and its report as text and JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from typing import Any

import torch

from sglang_dflash.check.advice import Advice, more_requests
from sglang_dflash.check.flags import check_flags, check_linear_backends, check_refused
from sglang_dflash.check.memory import MemoryTable, expected_memory, unknown_size
from sglang_dflash.check.pools import Pools
from sglang_dflash.errors import DFlashError, Finding, error, note, ok, warn
from sglang_dflash.launch.asked import Launch
from sglang_dflash.launch.device import Device
from sglang_dflash.launch.division import TOKENS_PER_REQUEST, size
from sglang_dflash.launch.pair_rules import ITS_DRAFTER
from sglang_dflash.launch.plan import ServingPlan, decide
from sglang_dflash.launch.published import published_drafters
from sglang_dflash.launch.rules import EARLY, LATE, judge
from sglang_dflash.launch.settings import Settings

TITLE = 72  # columns before the verdict
MIN_LENGTH = 2048  # for a prompt and a short answer
_RUNNING, _LENGTH = "running requests", "tokens per request"
_NAME = 36  # columns before a value
_FLAG = 48  # columns of proposed flags
_MARK = {"error": "x", "warn": "!", "note": "-"}
_LEVELS = {"error": "error", "warn": "warning", "note": "note"}


@dataclass(frozen=True)
class Report:
    findings: list[Finding]
    plan: ServingPlan | None = None
    memory: MemoryTable | None = None
    advice: Sequence[Advice] = ()

    @property
    def counts(self) -> Counter[str]:
        return Counter(finding.level for finding in self.findings)

    @property
    def exit_code(self) -> int:
        return 2 if self.counts["error"] else 1 if self.counts["warn"] else 0

    @property
    def proposed(self) -> Advice | None:
        """What lets most requests run on this GPU, if none fits without it and nothing else is wrong."""
        here = [each for each in self.advice if each.gpus == 1]
        only_memory = all(finding.about == _RUNNING for finding in self.findings if finding.level == "error")
        return max(here, key=attrgetter("running"), default=None) if self.counts["error"] and only_memory else None

    @property
    def verdict(self) -> str:
        errors, memory = self.counts["error"], self.memory
        if memory is not None and memory.static_bytes and not memory.served.running:
            return "DOES NOT FIT"
        if errors:
            return f"REFUSED: {errors} error{'s' if errors > 1 else ''}"
        if self.plan is None:
            return "SGLANG'S OWN WORKER SERVES"
        if memory is None or not memory.static_bytes:
            return "COMPATIBLE: memory unknown"
        if any(finding.about == _LENGTH and finding.level == "warn" for finding in self.findings):
            return f"SHORT OF K/V: {_lengths(memory.served)}"
        return f"FITS: {memory.served.running} of {memory.served.sizing.max_running} requests at once"

    def as_json(self) -> dict[str, Any]:
        memory = self.memory and {
            **asdict(self.memory),
            "served": _pools_json(self.memory.served),
            "other": self.memory.other and _pools_json(self.memory.other),
            "advice": [asdict(each) for each in self.advice],
        }
        return {
            "findings": [asdict(finding) for finding in self.findings],
            "plan": self.plan and self.plan.describe(),
            "memory": memory,
            "exit_code": self.exit_code,
        }

    def lines(self, title: str, command: str, *, verbose: bool) -> Iterator[str]:
        yield f"{title:{TITLE}} {self.verdict}"
        yield from self._summary()
        for finding in self.findings:
            if finding.level != "ok":
                yield from self._finding(finding, verbose)
        found = [f"{n} {name}{'s' if n > 1 else ''}" for level, name in _LEVELS.items() if (n := self.counts[level])]
        yield "\n" + ", ".join([f"{self.counts['ok']} checks passed (-v lists them)", *found]) + "."
        if not self.counts["error"] or self.proposed:
            yield f"Start: {command}{f' {self.proposed.flag}' if self.proposed else ''}"
        for heading, rows in self._tables() if verbose else ():
            yield f"\n{heading}"
            for name, value in rows:
                yield f"{name:<{_NAME}}{', '.join(map(str, value)) if isinstance(value, list) else value}"

    def _summary(self) -> Iterator[str]:
        plan, memory = self.plan, self.memory
        if plan is not None:
            parts = [f"block {plan.block}", "fixed width" if plan.widths is None else "adaptive width"]
            parts += ["copied blocks" if plan.copies else "no copies"]
            if memory is not None and memory.other is not None:
                parts += ["states replayed" if plan.replay else "states kept"]
            yield f"  {', '.join(parts)}"
        if memory is not None and memory.served.tokens:
            pools = memory.served
            each, limit = pools.kv.per_request(pools.running)
            lengths = f"; {_lengths(pools)}" if pools.requests_of(TOKENS_PER_REQUEST) < pools.running else ""
            sliding = f", {pools.sliding_tokens:,} in sliding layers" if pools.sliding_tokens else ""
            ended = f", limited by {limit}" if sliding else ""
            parts = [f"K/V {pools.tokens:,} tokens{sliding} ({each:,} per request{ended}{lengths})"]
            if pools.state.slot and pools.sizing.slots_per_request > 1:
                parts += [f"{pools.prefixes:,} cached prefixes"]
            yield f"  {', '.join(parts)}"

    def _finding(self, finding: Finding, verbose: bool) -> Iterator[str]:
        yield f"\n  {_MARK[finding.level]} {finding.about}: {finding.value}"
        advises = finding.about == _RUNNING and bool(self.advice)
        if finding.remedy and (verbose or finding.level == "error" or (finding.level == "warn" and not advises)):
            yield f"      Fix: {finding.remedy}"
        if advises:
            for each in self.advice:
                flag = each.flag if len(each.flag) <= _FLAG else f"{each.flag}\n{'':{_FLAG + 6}}"
                requests = f"{each.running:>4,} request{'s' if each.running > 1 else ' '}"
                yield f"      {flag:{_FLAG}} {requests} {each.tokens:>11,} tokens   {each.price}".rstrip()

    def _tables(self) -> Iterator[tuple[str, Iterable[tuple[str, object]]]]:
        yield "Passed", [(finding.about, finding.value) for finding in self.findings if finding.level == "ok"]
        if self.plan is not None:
            yield "Plan", self.plan.describe().items()
        if self.memory is not None:
            static = f", {size(self.memory.static_bytes)} static" if self.memory.static_bytes else ""
            yield f"Memory of one rank ({self.memory.device}{static})", _memory_rows(self.memory.served)


def _memory_rows(pools: Pools) -> Iterator[tuple[str, object]]:
    for pool, (number, each, unit) in pools.units.items():
        if each:
            per_unit = f"{size(each)} per {unit}"
            yield pool.replace("_", " "), f"{size(number * each):10} ({per_unit})" if number > 1 else per_unit
    if pools.tokens:
        yield "sum", size(sum(pools.bytes.values()))
    if pools.running and (each := pools.sizing.indices):
        yield "indices of CUDA graphs, beside it", f"{size(pools.running * each):10} ({size(each)} per request)"


def _pools_json(pools: Pools) -> dict[str, Any]:
    return asdict(pools) | {"bytes": pools.bytes, "capped_by": pools.capped_by, "prefixes": pools.prefixes}


def preflight(settings: Settings, device: Device) -> Report:
    """Apply the rules of a start, decide the plan, and divide the memory. A refusal ends the report."""
    launch, findings = Launch.of(settings, device), list[Finding]()
    try:
        findings += _one_cause([*judge(launch, EARLY)], settings.model_path)
        if _goes_on(findings):
            findings += [
                *check_refused(launch),
                *check_linear_backends(launch, torch.version.cuda),
                *check_flags(launch),
            ]
        if _goes_on(findings):
            findings += judge(launch, LATE)
    except DFlashError as refused:
        return Report([*findings, Finding.of(refused, "configuration")])
    if not _goes_on(findings):
        return Report([*map(_left, findings)])
    plan = decide(launch)
    if unknown := unknown_size(launch):
        return Report([*findings, unknown], plan)
    try:
        memory = expected_memory(launch)
    except DFlashError as refused:  # SGLang may have better sizes
        return Report([*findings, replace(Finding.of(refused, "memory"), estimated=True)], plan)
    findings += _sizes(launch, memory)
    return Report(findings, plan, memory, more_requests(launch, memory))


def _goes_on(findings: Iterable[Finding]) -> bool:
    return all(finding.level not in ("error", "builtin") for finding in findings)


def _left(finding: Finding) -> Finding:
    if finding.level != "builtin":
        return finding
    value = f"SGLang's own worker serves this pair: {finding.value}. `check` cannot predict its memory"
    return warn(value, about="worker")


def _one_cause(findings: Sequence[Finding], target: str) -> list[Finding]:
    """Join what another target's drafter breaks into one error."""
    wrong = [finding for finding in findings if finding.level == "error" and finding.remedy == ITS_DRAFTER]
    if not wrong:
        return list(findings)
    drafter = published_drafters().get(target)
    remedy = f"{ITS_DRAFTER}{f': {drafter}' if drafter else ''}"
    cause = "the drafter was trained for another target: " if len(wrong) > 1 else ""
    value = cause + "; ".join(finding.value for finding in wrong)
    joined = error(value, remedy=remedy, about=wrong[0].about if not cause else "pair")
    return [joined, *(finding for finding in findings if finding not in wrong)]


def _sizes(launch: Launch, memory: MemoryTable) -> Iterator[Finding]:
    if not memory.static_bytes:
        yield ok("no GPU here; use --gpu or --memory-gib to check another machine", about=_RUNNING)
        return
    smaller = "a smaller target" if launch.settings.quantization or launch.quantisation_method else "a quantised target"
    weights, static = memory.served.sizing.weights, memory.static_bytes
    if memory.weighed and weights < static:
        yield ok(f"{size(weights)} of {size(static)}", about="weights")
    is_estimate = not memory.weighed or weights < static
    yield replace(_running(launch.settings, memory, smaller), about=_RUNNING, estimated=is_estimate)
    yield replace(_tokens(memory.served, smaller), about=_LENGTH, estimated=True)


def _running(settings: Settings, memory: MemoryTable, smaller: str) -> Finding:
    served, wanted = memory.served, memory.served.sizing.max_running
    if served.running >= wanted:
        return ok(f"{wanted} at once, with {served.tokens:,} tokens of K/V in total")
    if served.running == 0:
        slots, share = served.sizing.slots_per_request, f"their share holds {served.state_slots}"
        few = f"; one request takes {slots} recurrent states, {share}" if 0 < served.state_slots < slots else ""
        room = f"{size(memory.static_bytes)} ({memory.fraction} of the device)"
        return error(
            f"no request fits: the weights of one rank take {size(served.sizing.weights)} of {room}{few}",
            remedy=f"add flags of a line below, or serve {smaller}",
        )
    level = warn if settings.max_running_requests else note  # otherwise the number is SGLang's default
    return level(
        f"{served.running} of {wanted} requests (--max-running-requests) fit at once, with {served.tokens:,} tokens of "
        f"K/V in total; the limit: {served.capped_by}",
        remedy="use more or larger GPUs, or accept the smaller number",
    )


def _tokens(pools: Pools, smaller: str) -> Finding:
    least, long = min(MIN_LENGTH, pools.sizing.context), max(1, pools.requests_of(TOKENS_PER_REQUEST))
    if not pools.running or pools.requests_of(least) >= pools.running:
        return ok(_lengths(pools))
    each, limit = pools.kv.per_request(pools.running)
    wider = "raise --swa-full-tokens-ratio, " if "sliding" in limit else ""
    return warn(
        f"{each:,} tokens of {limit} per request: {_lengths(pools)}",
        remedy=f"{wider}set --max-running-requests {long}, or use more GPUs (--tp-size) or {smaller}",
    )


def _lengths(pools: Pools) -> str:
    short, long = pools.requests_of(MIN_LENGTH), pools.requests_of(TOKENS_PER_REQUEST)
    return f"{short:,} requests at {MIN_LENGTH:,} tokens, {long:,} at {TOKENS_PER_REQUEST:,}"
