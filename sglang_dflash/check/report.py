"""The preflight of ``sglang-dflash check``, and its report as text and JSON."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from typing import Any

from sglang_dflash.check.advice import Advice, more_requests
from sglang_dflash.check.memory import check_fraction, is_weighed, predict, static_fraction, uncounted, unknown_size
from sglang_dflash.check.pools import Pools
from sglang_dflash.errors import DFlashError, Finding, error, ok, warn
from sglang_dflash.launch.device import Device
from sglang_dflash.launch.division import TOKENS_PER_REQUEST, size
from sglang_dflash.launch.launch import Launch
from sglang_dflash.launch.pair_rules import ITS_DRAFTER
from sglang_dflash.launch.plan import ServingPlan, decide
from sglang_dflash.launch.published import card_of_target
from sglang_dflash.launch.rules import EARLY, LATE, judge
from sglang_dflash.launch.settings import Settings

TITLE = 72  # columns before the verdict
MIN_LENGTH = 2048  # tokens of a prompt and a short answer
_RUNNING, _LENGTH = "running requests", "tokens per request"
_NAME = 36  # columns before a value
_FLAG = 48  # columns of proposed flags
_MARK = {"error": "x", "warn": "!", "note": "-"}
_LEVELS = {"error": "error", "warn": "warning", "note": "note"}


@dataclass(frozen=True)
class Report:
    findings: list[Finding]
    plan: ServingPlan | None = None
    memory: Pools | None = None
    advice: Sequence[Advice] = ()
    replicas: int = 1  # servers behind one address
    command: str = ""  # starts a server, without proposed flags

    @property
    def counts(self) -> Counter[str]:
        return Counter(finding.level for finding in self.findings)

    @property
    def exit_code(self) -> int:
        return 2 if self.counts["error"] else 1 if self.counts["warn"] else 0

    @property
    def proposed(self) -> Advice | None:
        """The advice that lets most requests run on this GPU, if none fits without it."""
        if self.memory is None or not self.memory.static_bytes or self.memory.running:
            return None
        return max((each for each in self.advice if each.gpus == 1), key=attrgetter("running"), default=None)

    @property
    def start(self) -> str | None:
        """The command that starts a server, with proposed flags; None after an error."""
        if self.counts["error"]:
            return None
        return f"{self.command} {self.proposed.flag}" if self.proposed else self.command

    @property
    def verdict(self) -> str:
        errors, memory = self.counts["error"], self.memory
        if self.proposed and not errors:
            return f"FITS WITH FLAGS: {_requests(self.proposed.running)}"
        if memory is not None and memory.static_bytes and not memory.running:
            return "DOES NOT FIT"
        if errors:
            return f"REFUSED: {errors} error{'s' if errors > 1 else ''}"
        if self.plan is None:
            return "SGLANG'S OWN WORKER SERVES"
        if memory is None or not memory.static_bytes:
            return "COMPATIBLE: memory unknown"
        each = f" on each of {self.replicas} replicas" if self.replicas > 1 else ""
        if any(finding.about == _LENGTH and finding.level == "warn" for finding in self.findings):
            return f"SHORT OF K/V: {_lengths(memory)}{each}"
        return f"FITS: {memory.running} of {memory.sizing.max_running} requests at once{each}"

    def as_json(self) -> dict[str, Any]:
        memory = self.memory and {
            "static_bytes": self.memory.static_bytes,
            "served": _pools_json(self.memory),
            "advice": [asdict(each) for each in self.advice],
        }
        return {
            "verdict": self.verdict,
            "command": self.start,
            "proposed": self.proposed and self.proposed.flag,
            "findings": [asdict(finding) for finding in self.findings],
            "plan": self.plan and self.plan.describe(),
            "memory": memory,
            "exit_code": self.exit_code,
        }

    def lines(self, title: str, *, verbose: bool) -> Iterator[str]:
        yield f"{title:{TITLE}} {self.verdict}"
        yield from self._summary()
        for finding in self.findings:
            if finding.level != "ok":
                yield from self._finding(finding, verbose)
        found = [f"{n} {name}{'s' if n > 1 else ''}" for level, name in _LEVELS.items() if (n := self.counts[level])]
        yield "\n" + ", ".join([f"{self.counts['ok']} checks passed (-v lists them)", *found]) + "."
        if self.start:
            yield f"Start: {self.start}"
        for heading, rows in self._tables() if verbose else ():
            yield f"\n{heading}"
            for name, value in rows:
                yield f"{name:<{_NAME}} {', '.join(map(str, value)) if isinstance(value, list) else value}"

    def _summary(self) -> Iterator[str]:
        plan, memory = self.plan, self.memory
        if plan is not None:
            parts = [f"block {plan.block}", "fixed width" if plan.widths is None else "adaptive width"]
            parts += ["copied blocks" if plan.copies else "no copies"]
            yield f"  {', '.join(parts)}"
        if memory is not None and memory.tokens:
            pools = memory
            each, limit = pools.kv.per_request(pools.running)
            lengths = f"; {_lengths(pools)}" if pools.requests_of(TOKENS_PER_REQUEST) < pools.running else ""
            sliding = f", {pools.sliding_tokens:,} in sliding layers" if pools.sliding_tokens else ""
            ended = f", limited by {limit}" if sliding else ""
            conversation = f"; one conversation of {pools.longest:,} tokens"
            parts = [f"K/V {pools.tokens:,} tokens{sliding} ({each:,} per request{ended}{lengths}{conversation})"]
            if pools.sizing.state and pools.sizing.slots_per_request > 1:
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
                row = f"{flag:{_FLAG}} {_requests(each.running):>13} {each.tokens:>11,} tokens   {each.price}"
                yield f"      {row}".rstrip()

    def _tables(self) -> Iterator[tuple[str, Iterable[tuple[str, object]]]]:
        yield "Passed", [(each.about, each.value) for each in self.findings if each.level == "ok" and each.value]
        if self.plan is not None:
            yield "Plan", [(name, value) for name, value in self.plan.describe().items() if value not in (None, "null")]
        if self.memory is not None:
            yield f"Memory of one rank, {size(self.memory.static_bytes) or 'unknown'} static", _memory_rows(self.memory)


def _memory_rows(pools: Pools) -> Iterator[tuple[str, object]]:
    for pool, (number, each, unit) in pools.units.items():
        if each:
            per_unit = f"{size(each)} per {unit}"
            yield pool.replace("_", " "), f"{size(number * each):10} ({per_unit})" if number > 1 else per_unit
    if pools.tokens:
        yield "sum", size(sum(pools.bytes.values()))
    if pools.running and (each := pools.sizing.indices):
        yield "indices of CUDA graphs, outside it", f"{size(pools.running * each):10} ({size(each)} per request)"


def _pools_json(pools: Pools) -> dict[str, Any]:
    return asdict(pools) | {
        "bytes": pools.bytes,
        "capped_by": pools.capped_by,
        "prefixes": pools.prefixes,
        "longest": pools.longest,
    }


def _requests(number: int) -> str:
    return f"{number:,} request{'s' if number > 1 else ''}"


def preflight(settings: Settings, device: Device) -> Report:
    """Apply the rules of a start, decide the plan, and divide the memory. A refusal ends the report."""
    launch, findings = Launch.of(settings, device), list[Finding]()
    about = "target"
    try:
        _ = launch.target_files.published
        about = "drafter"
        _ = launch.has_drafter and launch.drafter_files.published
        about = "configuration"
        findings += _one_cause([*judge(launch, EARLY)], settings.model_path)
        if _goes_on(findings):
            if settings.pp_size > 1:
                findings.append(error("DFLASH needs one pipeline stage", "leave --pp-size out", "pipeline stages"))
            findings += judge(launch, LATE)
    except DFlashError as refused:
        return Report([*findings, Finding.of(refused, about)])
    if not _goes_on(findings):
        return Report([*map(_left, findings)])
    plan = decide(launch)
    if unknown := unknown_size(launch):
        return Report([*findings, unknown], plan)
    try:
        memory = predict(launch, plan)
    except DFlashError as refused:  # SGLang may have better sizes
        return Report([*findings, Finding.of(refused, "memory")], plan)
    advice = more_requests(launch, memory)
    findings += [*check_fraction(launch), *uncounted(launch), *_sizes(launch, memory, advice)]
    return Report(findings, plan, memory, advice, settings.replicas)


def _goes_on(findings: Iterable[Finding]) -> bool:
    return all(finding.level not in ("error", "builtin") for finding in findings)


def _left(finding: Finding) -> Finding:
    if finding.level != "builtin":
        return finding
    value = f"SGLang's own worker serves this pair: {finding.value}. `check` cannot predict its memory"
    return warn(value, about="worker")


def _one_cause(findings: Sequence[Finding], target: str) -> list[Finding]:
    """Join the errors of a drafter of another target into one."""
    wrong = [finding for finding in findings if finding.level == "error" and finding.remedy == ITS_DRAFTER]
    if not wrong:
        return list(findings)
    card = card_of_target(target)
    remedy = f"{ITS_DRAFTER}: {card['drafter']}" if card else ITS_DRAFTER
    cause = "the drafter was trained for another target: " if len(wrong) > 1 else ""
    value = cause + "; ".join(finding.value for finding in wrong)
    joined = error(value, remedy=remedy, about=wrong[0].about if not cause else "pair")
    return [joined, *(finding for finding in findings if finding not in wrong)]


def _sizes(launch: Launch, pools: Pools, advice: Sequence[Advice]) -> Iterator[Finding]:
    if not pools.static_bytes:
        yield ok("no GPU here; use --gpu or --memory-gib to check another machine", about=_RUNNING)
        return
    smaller = "a smaller target" if launch.settings.quantization or launch.quantisation_method else "a quantised target"
    weights, static = pools.sizing.weights, pools.static_bytes
    if is_weighed(launch) and weights < static:
        yield ok(f"{size(weights)} of {size(static)}", about="weights")
    yield replace(_running(launch, pools, advice, smaller), about=_RUNNING)
    yield replace(_tokens(pools, smaller), about=_LENGTH)


def _running(launch: Launch, pools: Pools, advice: Sequence[Advice], smaller: str) -> Finding:
    sizing, wanted = pools.sizing, pools.sizing.max_running
    if pools.running >= wanted:
        return ok(f"{wanted} at once, with {pools.tokens:,} tokens of K/V in total")
    if pools.running == 0:
        parts = [f"the weights of one rank take {size(sizing.weights)} of {size(pools.static_bytes)} "
                 f"({static_fraction(launch)} of the device)"]  # fmt: skip
        if sizing.state:
            parts += [f"recurrent states of one request {size(sizing.slots_per_request * sizing.state)}"]
            parts += [f"verify buffers of {_requests(wanted)} {size((wanted + 1) * sizing.scratch)}"]
        level = warn if any(each.gpus == 1 for each in advice) else error
        return level(
            f"no request fits: {', '.join(parts if sizing.weights < pools.static_bytes else parts[:1])}",
            remedy=f"add flags of a line below, or serve {smaller}",
        )
    return warn(
        f"{pools.running} of {wanted} requests (--max-running-requests) fit at once, with {pools.tokens:,} tokens of "
        f"K/V in total; the limit: {pools.capped_by}",
        remedy=f"set --max-running-requests {pools.running}, or use more or larger GPUs",
    )


def _tokens(pools: Pools, smaller: str) -> Finding:
    least, long = min(MIN_LENGTH, pools.sizing.context), max(1, pools.requests_of(TOKENS_PER_REQUEST))
    if not pools.running or pools.requests_of(least) >= pools.running:
        return ok(_lengths(pools))
    each, limit = pools.kv.per_request(pools.running)
    wider = "raise --swa-full-tokens-ratio, " if "sliding" in limit else ""
    return warn(
        f"with {_requests(pools.running)} each gets {each:,} tokens of {limit}, and a request that finds none is "
        f"retracted and prefilled again; {_lengths(pools)} fit",
        remedy=f"{wider}set --max-running-requests {long}, or use more GPUs (--tp-size) or {smaller}",
    )


def _lengths(pools: Pools) -> str:
    short, long = pools.requests_of(MIN_LENGTH), pools.requests_of(TOKENS_PER_REQUEST)
    return f"{short:,} requests at {MIN_LENGTH:,} tokens, {long:,} at {TOKENS_PER_REQUEST:,}"
