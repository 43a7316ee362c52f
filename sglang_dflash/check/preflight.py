"""Every rule, in one order, for one pair on one machine: a server that starts and ``sglang-dflash check`` run these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from sglang_dflash.check.arguments import check_arguments
from sglang_dflash.check.backends import check_backends
from sglang_dflash.check.code import check_code
from sglang_dflash.check.demand import demand
from sglang_dflash.check.findings import Doubt, Finding, judge, of_error
from sglang_dflash.check.pair import check_pair
from sglang_dflash.check.remedies import With, remedies
from sglang_dflash.check.replay import better_ratio, is_replayed
from sglang_dflash.check.tokens import check_tokens
from sglang_dflash.check.vocabulary import check_vocabulary
from sglang_dflash.check.weights import check_weights
from sglang_dflash.drafter.config import DrafterConfig, text_config
from sglang_dflash.drafter.files import ModelFiles
from sglang_dflash.drafter.kinds import kind_left_to_builtin
from sglang_dflash.drafter.reading import parse_object
from sglang_dflash.errors import DFlashError
from sglang_dflash.memory.fit import Demand, Fit, fit
from sglang_dflash.memory.machine import Machine
from sglang_dflash.memory.parameters import FAMILIES, is_known
from sglang_dflash.memory.replay import Weighed, weigh
from sglang_dflash.memory.sizes import is_hybrid
from sglang_dflash.memory.table import Advice, Pools
from sglang_dflash.memory.units import size

MEM_FRACTION = 0.85  # assumed; SGLang computes one from the device and its graphs


@dataclass(frozen=True)
class MemoryTable:
    """What the pair takes and how SGLang would divide a device: bytes unless named otherwise.

    Attributes:
        replay: whether verification keeps what tokens write, instead of the state after each of them.
        fit: the division.
        other: the division the other way; None for a dense target.
        weighed: both ways beside each other; None for a dense target, or without a device.
        advice: flags that would let more fit.
    """

    device: str
    static_bytes: int
    demand: Demand
    replay: bool
    fit: Fit
    other: Fit | None
    weighed: Weighed | None
    advice: list[Advice]

    @property
    def ways(self) -> list[Pools]:
        """As served, then the other way."""
        served = Pools.predicted(self.demand, self.fit, replay=self.replay)
        if self.other is None:
            return [served]
        return [served, Pools.predicted(self.demand, self.other, replay=not self.replay)]


@dataclass(frozen=True)
class Report:
    """Findings in the order of the rules, and the memory table if nothing stops the pair before."""

    findings: list[Finding]
    memory: MemoryTable | None = None


def preflight(args: Any, machine: Machine) -> Report:
    """Check a command line, reading configurations, headers and small files only.

    Args:
        args: server arguments by SGLang's names.
        machine: what will serve.
    """
    findings = list(check_arguments(args))
    if findings[0].level == "error":
        return Report(findings)  # there is a number that nothing can be computed with
    if not args.speculative_draft_model_path:
        return Report(findings)
    drafter_files = ModelFiles(args.speculative_draft_model_path, args.speculative_draft_model_revision)
    target_files = ModelFiles(args.model_path, args.revision)
    try:
        overrides = parse_object(args.json_model_override_args, "--json-model-override-args")
        if machine.kind == "gpu":
            _leave_to_builtin(kind_left_to_builtin(drafter_files.config))
        drafter = DrafterConfig.from_dict({**drafter_files.config, **overrides})
        target = {**target_files.config, **overrides}
        hybrid, tensors = is_hybrid(target), drafter_files.tensors
    except DFlashError as raised:
        return Report([*findings, of_error("configuration", raised)])
    names = target.get("architectures")
    architecture = names[0] if isinstance(names, list) and names else "?"
    findings.append(Finding("ok", "architecture", f"{architecture} + DFlashDraftModel"))
    findings.append(judge("drafter's code", check_code, drafter_files.config, bool(args.trust_remote_code)))
    findings += check_pair(drafter, target, args)
    findings += check_weights(drafter, tensors, target, args.dtype)
    findings += check_vocabulary(drafter, drafter_files, target_files)
    findings += check_tokens(drafter, drafter_files, target_files, args.chat_template)
    findings += check_backends(args, machine, hybrid=hybrid)
    if hybrid:
        findings.append(judge("recurrent snapshots for the prefix cache", _strategy, args.mamba_radix_cache_strategy))
    if any(finding.level == "error" for finding in findings):
        return Report(findings)  # sizes of a pair that does not fit together mean nothing
    if not is_known(target):
        return Report([*findings, judge("memory", _unknown_family, target)])
    try:
        memory = _divide(
            args, machine, lambda changed: demand(changed, machine, drafter, target, drafter_files, target_files)
        )
    except DFlashError as raised:  # SGLang divides the memory, and may know better
        return Report([*findings, replace(of_error("memory", raised), estimated=True)])
    if memory.weighed is not None:
        findings.append(Finding("ok", f"states {'replayed' if memory.replay else 'kept'}", str(memory.weighed)))
    return Report([*findings, replace(judge("running requests", _running, memory), estimated=True)], memory)


def _divide(args: Any, machine: Machine, demand_of: Callable[[Any], Demand]) -> MemoryTable:
    needed, memory, fraction = demand_of(args), machine.memory or 0, args.mem_fraction_static or MEM_FRACTION
    static = int(memory * fraction)
    replay = is_replayed(args, machine, needed, static)
    other = fit(needed, static, replay=not replay) if needed.state.slot else None
    weighed = weigh(needed, static) if other and static else None
    if replay and static and (ratio := better_ratio(args, needed, static)):
        args = With(args, mamba_full_memory_ratio=ratio)
        needed = demand_of(args)
        weighed = weighed and replace(weighed, running_replayed=fit(needed, static, replay=True).running)
    return MemoryTable(
        device=machine.name if memory else f"{machine.name}: sizes only",
        static_bytes=static,
        demand=needed,
        replay=replay,
        fit=fit(needed, static, replay=replay),
        other=other,
        weighed=weighed,
        advice=remedies(args, demand_of, replay=replay, memory=memory, fraction=fraction) if memory else [],
    )


def _leave_to_builtin(kind: str | None) -> None:
    if kind:
        raise Doubt(
            f"the drafter is of the kind {kind}",
            expected="a plain DFlash drafter",
            remedy="none needed on a GPU: SGLang's own worker serves it, without what this package adds",
        )


def _strategy(strategy: str) -> str:
    if strategy != "no_buffer":
        return strategy
    raise Doubt(
        "--mamba-radix-cache-strategy no_buffer",
        expected="extra_buffer: no_buffer turns overlap scheduling off and forces pages of one token",
        remedy="set --mamba-radix-cache-strategy extra_buffer",
    )


def _unknown_family(target: Any) -> str:
    raise Doubt(
        f"no sizes are known for targets of model_type {text_config(target).get('model_type')!r}",
        expected=f"one of {', '.join(sorted(FAMILIES))}",
        remedy="none needed: SGLang divides the memory when it starts",
    )


def _running(memory: MemoryTable) -> str:
    fitted, needed = memory.fit, memory.demand
    if memory.static_bytes == 0:
        return "no device to divide: --memory-gib asks about another machine"
    if fitted.running >= needed.max_running:
        return f"{needed.max_running} at once, {fitted.tokens} tokens of K/V between them"
    if fitted.running == 0:
        raise DFlashError(
            f"{size(memory.static_bytes)} of static memory do not hold weights and one request",
            expected=f"more than {size(fitted.weights)}",
            remedy="use more GPUs (--tp-size), a larger --mem-fraction-static or a quantised target",
        )
    [served, *_] = memory.ways
    more = [f"{each.flag} ({each.running} fit)" for each in memory.advice if each.running > fitted.running]
    raise Doubt(
        f"{needed.max_running} asked for (--max-running-requests), {fitted.running} fit at once",
        expected=f"memory for {needed.max_running}: {served.capped_by} take it",
        remedy=f"set {', or '.join(more)}" if more else "use more or larger GPUs, or accept the smaller number",
    )
