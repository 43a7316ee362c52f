"""Every rule, in one order, for one pair on one machine.

A server that starts and ``sglang-dflash check`` run the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sglang_dflash.check.arguments import check_arguments
from sglang_dflash.check.backends import check_backends, torch_cuda
from sglang_dflash.check.drafter_files import check_code, check_weights
from sglang_dflash.check.findings import Finding, judge, of_error
from sglang_dflash.check.pair import check_pair
from sglang_dflash.check.tokens import check_tokens, check_vocabulary
from sglang_dflash.drafter.config import text_config
from sglang_dflash.drafter.formats import kind_left_to_builtin
from sglang_dflash.errors import DFlashError, Doubt
from sglang_dflash.memory.machine import Machine, size
from sglang_dflash.memory.outside import FLOOR, Outside
from sglang_dflash.memory.sizes import is_hybrid
from sglang_dflash.plan.advice import HIGHEST_FRACTION, With
from sglang_dflash.plan.decide import SWITCH, builtin_requested, decide, reason_for_builtin
from sglang_dflash.plan.memory import MemoryTable
from sglang_dflash.plan.mix import Mix, Split, Splits
from sglang_dflash.plan.pair import drafter_files, read_pair
from sglang_dflash.plan.serving import ServingPlan


def check_rules(args: Any, machine: Machine) -> list[Finding]:
    """Findings on a command line, from configurations, headers and small files.

    Args:
        args: server arguments by SGLang's names.
        machine: what will serve.
    """
    findings = list(check_arguments(args))
    if findings[0].level == "error":
        return findings  # there is a number that nothing can be computed with
    if not args.speculative_draft_model_path:
        return findings
    try:
        if machine.kind == "gpu":
            _leave_to_builtin(kind_left_to_builtin(drafter_files(args).config))
        pair = read_pair(args)
        hybrid, tensors = is_hybrid(pair.target), pair.drafter_files.tensors
    except DFlashError as raised:
        return [*findings, of_error("configuration", raised)]
    drafter, target, files = pair.drafter, pair.target, (pair.drafter_files, pair.target_files)
    names = target.get("architectures")
    architecture = names[0] if isinstance(names, list) and names else "?"
    findings.append(Finding("ok", "architecture", f"{architecture} + DFlashDraftModel"))
    findings.append(judge("drafter's code", check_code, pair.drafter_files.config, bool(args.trust_remote_code)))
    findings += check_pair(drafter, target, args)
    findings += check_weights(drafter, tensors, target, args.dtype, args.speculative_draft_model_quantization)
    findings += check_vocabulary(drafter, *files)
    findings += check_tokens(drafter, *files, args.chat_template)
    slides = drafter.sliding_window is not None
    findings += check_backends(args, machine, hybrid=hybrid, slides=slides, cuda=torch_cuda())
    findings.append(judge("target's quantisation", _quantisation, args.quantization, target))
    if hybrid:
        findings.append(judge("recurrent snapshots for the prefix cache", _strategy, args.mamba_radix_cache_strategy))
    return findings


def check_memory(plan: ServingPlan) -> Iterator[Finding]:
    """Findings on the plan's expected memory. All but the weights are estimates: a server warns of them and starts."""
    if plan.unsized is not None:
        yield replace(of_error("memory", plan.unsized), estimated=True)
    if (memory := plan.memory) is not None:
        if memory.static_bytes and len(memory.ways) > 1:
            yield Finding("ok", f"states {'replayed' if memory.ways[0].replay else 'kept'}", _both_ways(memory))
        if memory.static_bytes and memory.demand.weighed:
            yield judge("weights", _weights, memory)
        yield replace(judge("running requests", _running, memory), estimated=True)
        if memory.outside is not None:
            yield replace(judge("memory beside the static share", _outside, memory, memory.outside), estimated=True)


def _leave_to_builtin(kind: str | None) -> None:
    if kind:
        raise Doubt(
            f"the drafter is of the kind {kind}",
            expected="a plain DFlash drafter",
            remedy="none needed on a GPU: SGLang's own worker serves it, without what this package adds",
        )


def _quantisation(asked: str | None, target: Mapping[str, Any]) -> str:
    stored = target.get("quantization_config") or text_config(target).get("quantization_config")
    method = str(stored.get("quant_method")) if isinstance(stored, Mapping) else "unquant"
    if asked is None or asked.startswith(method):  # gptq_marlin serves gptq, modelopt_fp8 serves modelopt
        return method
    form = "unquantised" if method == "unquant" else f"as {method}"
    raise Doubt(
        f"--quantization {asked}, and the checkpoint is stored {form}",
        expected="a checkpoint that is stored as it is served: its weights are counted as they are stored",
        remedy="read the memory that the server logs at its start, or serve a checkpoint that is quantised already",
    )


def _switch() -> str:
    if not builtin_requested():
        return "this package's worker"
    raise Doubt(
        f"{SWITCH}=builtin: SGLang's own worker serves, and nothing is checked for it",
        expected=f"{SWITCH} unset",
        remedy=f"unset {SWITCH} to check this package's worker",
    )


def _worker(args: Any, machine: Machine) -> str:
    on_cpu = machine.kind == "cpu"
    reason = reason_for_builtin(With(args, device="cpu" if on_cpu else args.device or "cuda"), on_cpu=on_cpu)
    if reason is None:
        return "sglang-dflash"
    raise Doubt(
        f"SGLang's own worker serves: {reason}",
        expected="arguments that this package's worker serves",
        remedy="none to serve it; memory is not checked for SGLang's own worker",
    )


def _strategy(strategy: str) -> str:
    if strategy != "no_buffer":
        return strategy
    raise Doubt(
        "--mamba-radix-cache-strategy no_buffer",
        expected="extra_buffer: no_buffer turns overlap scheduling off and forces pages of one token",
        remedy="set --mamba-radix-cache-strategy extra_buffer",
    )


def _both_ways(memory: MemoryTable) -> str:
    kept, replayed = sorted(memory.ways, key=lambda pools: pools.replay)
    return (
        f"{size(replayed.scratch)} of scratch a request replayed, {size(kept.scratch)} kept; of {kept.asked} requests "
        f"{replayed.running} run at once replayed, {kept.running} kept"
    )


def _weights(memory: MemoryTable) -> str:
    weights, static, fraction = memory.demand.weights, memory.static_bytes, memory.fraction
    if weights < static:
        return f"{size(weights)} of {size(static)}"
    wider = f"--mem-fraction-static {HIGHEST_FRACTION}, " if weights * fraction < static * HIGHEST_FRACTION else ""
    raise DFlashError(
        f"the weights of one rank take {size(weights)}, and static memory is {size(static)} ({fraction} of the device)",
        expected="static memory that holds the weights and leaves room for K/V",
        remedy=f"set {wider}a larger --tp-size, or serve a quantised target (FP8)",
    )


def _running(memory: MemoryTable) -> str:
    served, demand = memory.ways[0], memory.demand
    if memory.static_bytes == 0:
        return "no device to divide: --memory-gib asks about another machine"
    if served.running >= demand.max_running:
        return f"{demand.max_running} at once, {served.tokens} tokens of K/V between them"
    if served.running == 0:
        raise DFlashError(
            f"{size(memory.static_bytes)} of static memory do not hold weights and one request",
            expected=f"more than {size(demand.weights)}",
            remedy="use more GPUs (--tp-size), a larger --mem-fraction-static or a quantised target",
        )
    more = [
        f"{each.flag} ({each.running} fit, {each.tokens} tokens of K/V)"
        for each in memory.advice
        if each.running > served.running
    ]
    raise Doubt(
        f"{demand.max_running} asked for (--max-running-requests), {served.running} fit at once, "
        f"{served.tokens} tokens of K/V between them",
        expected=f"memory for {demand.max_running}: {served.capped_by} take it",
        remedy=f"set {', or '.join(more)}" if more else "use more or larger GPUs, or accept the smaller number",
    )


def _mix(args: Any, machine: Machine, memory: MemoryTable, mix: Mix) -> str:
    served = memory.ways[0]
    if memory.static_bytes == 0:
        return "no device to divide: --memory-gib asks about another machine"
    kept = f"{mix.held_by(served)} contexts kept"
    if mix.served_by(served) and mix.held_by(served) >= mix.conversations:
        return f"served; {kept}"
    splits = Splits(args, machine, read_pair(args), memory)
    if split := splits.best(mix):
        remedy = f"set {_told(split)}"
    else:
        remedy = "nothing serves them here"
        if (most := splits.most(mix)) is not None:
            remedy += f": at most {most.pools.running} users with {_told(most)}"
        for flag, changed in (
            (f"--tp-size {2 * args.tp_size}", {"tp_size": 2 * args.tp_size}),
            ("--kv-cache-dtype fp8_e4m3", {"kv_cache_dtype": "fp8_e4m3"}),
        ):
            wider = Splits(With(args, **changed), machine, read_pair(args), memory).best(mix)
            remedy += f"; or {flag} {_told(wider)}" if wider else ""
    contexts = max(mix.users, mix.conversations)
    raise Doubt(
        f"{served.running} at once, {served.tokens} tokens of K/V between them; {kept}",
        expected=f"{mix.users} at once, {contexts * mix.context} tokens of K/V"
        + f", {mix.conversations} contexts kept" * (mix.conversations > 0),
        remedy=remedy,
    )


def _told(split: Split) -> str:
    return f"{' '.join(split.flags)} ({split.pools.tokens} tokens of K/V, {split.conversations} contexts kept)"


def _outside(memory: MemoryTable, outside: Outside) -> str:
    taken, sets = outside.sampling + outside.buffers, f"{outside.sets} set{'s' * (outside.sets > 1)} of graphs"
    needs = f"sampling {size(outside.sampling)}, attention buffers of {sets} {size(outside.buffers)}"
    if outside.left >= FLOOR:
        return f"{needs}; {size(outside.left)} left for activations and graphs"
    whole = memory.static_bytes + taken + outside.left
    lower = math.floor(100 * (whole - taken - FLOOR) / whole) / 100
    fewer = "fewer requests or a shorter --context-length"
    raise Doubt(
        f"{needs}; {size(max(0, outside.left)) or 'nothing'} left for activations and graphs",
        expected=f"{size(FLOOR)} or more",
        remedy=f"set --mem-fraction-static {lower:.2f}, {fewer}" if lower > 0 else f"ask for {fewer}",
    )


@dataclass(frozen=True)
class Report:
    """Findings in the order of the rules, and the plan unless something stops the pair before."""

    findings: list[Finding]
    plan: ServingPlan | None = None

    @property
    def memory(self) -> MemoryTable | None:
        return None if self.plan is None else self.plan.memory


def preflight(args: Any, machine: Machine, mix: Mix | None = None) -> Report:
    """Check a command line.

    Args:
        args: server arguments by SGLang's names.
        machine: what will serve.
        mix: what it should hold at once; None if the user did not say.
    """
    switch = judge(SWITCH, _switch)
    if switch.level != "ok":
        return Report([switch])
    findings = check_rules(args, machine)
    if not args.speculative_draft_model_path or any(finding.level == "error" for finding in findings):
        return Report(findings)  # sizes of a pair that does not fit together mean nothing
    if any(finding.about == "configuration" for finding in findings):
        return Report(findings)  # left to SGLang's own worker
    findings.append(judge("worker", _worker, args, machine))
    if findings[-1].level != "ok":
        return Report(findings)
    try:
        plan = decide(args, machine, hybrid=is_hybrid(read_pair(args).target))
    except DFlashError as raised:
        return Report([*findings, of_error("flags", raised)])
    findings += check_memory(plan)
    if mix is not None and plan.memory is not None:
        about = f"{mix.users} users of {mix.context} tokens"
        findings.append(replace(judge(about, _mix, args, machine, plan.memory, mix), estimated=True))
    return Report(findings, plan)
