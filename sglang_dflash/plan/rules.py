"""Every rule of the preflight, in one order, for one pair on one machine.

A server that starts and ``sglang-dflash check`` run the same ones.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sglang_dflash.drafter.config import text_config
from sglang_dflash.drafter.formats import kind_left_to_builtin
from sglang_dflash.errors import DFlashError, Doubt
from sglang_dflash.plan.advice import HIGHEST_FRACTION, With
from sglang_dflash.plan.decide import SWITCH, builtin_requested, decide, reason_for_builtin
from sglang_dflash.plan.findings import Finding, judge, of_error
from sglang_dflash.plan.machine import Machine, size
from sglang_dflash.plan.memory import MemoryTable
from sglang_dflash.plan.mix import Mix, Split, Splits
from sglang_dflash.plan.pair import asked_block, drafter_files, flashinfer_states, read_pair
from sglang_dflash.plan.pair_rules import check_code, check_pair, check_tokens, check_vocabulary, check_weights
from sglang_dflash.plan.pools import FLOOR, Outside, default_backend
from sglang_dflash.plan.serving import ServingPlan
from sglang_dflash.plan.sizes import is_hybrid

# Argument -> the least and the most that it may be: what is multiplied, divided by and allocated.
_LIMITS: dict[str, tuple[float, float]] = {
    "context_length": (1, 1 << 31),
    "linear_replayssm_cache_len": (1, 1 << 16),
    "mamba_full_memory_ratio": (1e-6, 1e6),
    "mamba_track_interval": (1, 1 << 31),
    "max_mamba_cache_size": (1, 1 << 31),
    "max_running_requests": (1, 1 << 20),
    "max_total_tokens": (1, 1 << 40),
    "mem_fraction_static": (1e-6, 1),
    "page_size": (1, 1 << 20),
    "pp_size": (1, 1 << 16),
    "speculative_dflash_block_size": (1, 1 << 12),
    "speculative_draft_window_size": (1, 1 << 31),
    "speculative_num_draft_tokens": (1, 1 << 12),
    "tp_size": (1, 1 << 16),
}
_NEEDED = ("linear_replayssm_cache_len", "pp_size", "tp_size")


def check_arguments(args: Any) -> Iterator[Finding]:
    """Findings on the arguments themselves; only the first, an error, if one is no number to compute with."""
    numbers = judge("numbers", _numbers, args)
    yield numbers
    if numbers.level == "error":
        return
    yield judge("drafter", _drafter_path, args)
    yield judge("block flags", _block_flags, args)
    yield judge("pipeline parallelism", _pipeline, args)
    yield judge("recurrent snapshots", _track_interval, args)


def _numbers(args: Any) -> str:
    for name, (least, most) in _LIMITS.items():
        value = getattr(args, name)
        if value is None and name not in _NEEDED:
            continue
        if not isinstance(value, int | float) or not least <= value <= most:
            flag = "--" + name.replace("_", "-")
            raise DFlashError(
                f"{flag} {value}",
                expected=f"a number from {least} to {most}",
                remedy=f"correct it, or leave {flag} out",
            )
    return "each within its limits"


def _drafter_path(args: Any) -> str:
    if args.speculative_draft_model_path:
        return str(args.speculative_draft_model_path)
    raise DFlashError(
        "--speculative-algorithm DFLASH without --speculative-draft-model-path",
        expected="the drafter's path or hub id",
        remedy="set --speculative-draft-model-path; the drafter's card names its target",
    )


def _block_flags(args: Any) -> str:
    tokens, block = args.speculative_num_draft_tokens, args.speculative_dflash_block_size
    if tokens is None or block is None or tokens == block:
        return str(tokens or block or "from the drafter")
    raise DFlashError(
        f"--speculative-num-draft-tokens {tokens} and --speculative-dflash-block-size {block}",
        expected="one value: both are the block size",
        remedy="keep one of the two flags",
    )


def _pipeline(args: Any) -> str:
    if args.pp_size == 1:
        return "1"
    raise DFlashError(
        f"--pp-size {args.pp_size}",
        expected="1: a draft needs hidden states of the whole target",
        remedy="use --tp-size instead",
    )


def _track_interval(args: Any) -> str:
    block, interval = asked_block(args), args.mamba_track_interval
    if block is None or interval is None or interval >= block:
        return f"every {interval} tokens"
    raise DFlashError(
        f"--mamba-track-interval {interval}, block size {block}",
        expected="at most one snapshot a block",
        remedy=f"set --mamba-track-interval to {block} or more; 256 is SGLang's default",
    )


# Backend -> major compute capabilities that can run it; the others run everywhere.
_MAJORS = {"fa3": {8, 9}, "fa4": {9, 10, 11}, "trtllm_mha": {9, 10, 12}}
_HYBRID_ON_BLACKWELL = {"triton", "trtllm_mha", "flashinfer", "fa4"}
_TARGET_FLAGS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")


def check_backends(
    args: Any, machine: Machine, *, hybrid: bool, slides: bool = False, cuda: str | None = None
) -> Iterator[Finding]:
    """Findings on the backends of a command line.

    Args:
        args: server arguments by SGLang's names.
        machine: what serves; without a known compute capability there is nothing to check against.
        hybrid: whether the target has recurrent layers.
        slides: whether the drafter has sliding layers.
        cuda: the CUDA version of the torch that serves, if ``machine`` is this one; None if unknown.
    """
    if slides and _drafters(args) == "flashinfer":
        yield _waits(machine)
    flags = [*_TARGET_FLAGS, "speculative_draft_attention_backend"]
    asked = {flag: name for flag in flags if (name := getattr(args, flag))}
    if machine.capability is None:
        names = ", ".join(asked.values()) or "chosen by SGLang"
        known = f"{names}; not checked against {machine.name}: no compute capability is known"
        yield Finding("ok", "backends", known)
        return
    for flag, name in asked.items():
        option = "--" + flag.replace("_", "-")
        limited = hybrid and machine.is_blackwell and flag in _TARGET_FLAGS
        yield judge(option, _backend, option, name, machine.name, machine.capability, limited)
    if (fixed := flashinfer_states(args, machine)) is not None and args.mamba_ssm_dtype != "bfloat16":
        yield judge("recurrent state's dtype", _bfloat16_states, fixed, args.mamba_ssm_dtype, machine)
    prefill = args.linear_attn_prefill_backend or args.linear_attn_backend
    if machine.is_blackwell and prefill == "flashinfer":
        yield judge("torch's CUDA", _cuda_13, cuda if machine.told_by else None)


def torch_cuda() -> str | None:
    """The CUDA version that the installed torch was built with, without importing torch; None if unknown."""
    found = importlib.util.find_spec("torch")
    places = found.submodule_search_locations if found else None
    if not places or not (source := Path(places[0], "version.py")).exists():
        return None
    version = re.search(r"^cuda\b[^=]*= '([\d.]+)'", source.read_text(encoding="utf-8"), re.MULTILINE)
    return version and version[1]


def _bfloat16_states(flag: str, dtype: str | None, machine: Machine) -> str:
    value = f"{flag} flashinfer on {machine.name} needs recurrent states in bfloat16"
    if dtype is not None:
        raise DFlashError(
            f"{value}, and --mamba-ssm-dtype is {dtype}",
            expected="--mamba-ssm-dtype bfloat16",
            remedy=f"set --mamba-ssm-dtype bfloat16, or {flag} triton",
        )
    raise Doubt(
        value,
        expected="--mamba-ssm-dtype bfloat16",
        remedy="none: the server sets it. Pass it explicitly to silence this warning",
    )


def _cuda_13(cuda: str | None) -> str:
    value, expected = "FlashInfer's linear prefill on this GPU", "a torch that is built for CUDA 13 or later"
    remedy = "install such a torch, or set --linear-attn-prefill-backend triton"
    if cuda is None:
        raise Doubt(f"{value} needs CUDA 13, and the server's torch is unknown", expected=expected, remedy=remedy)
    if int(cuda.partition(".")[0]) < 13:
        raise DFlashError(f"{value} needs CUDA 13, and torch has CUDA {cuda}", expected=expected, remedy=remedy)
    return cuda


def _drafters(args: Any) -> str | None:
    """The drafter's attention backend; None if SGLang chooses it."""
    asked = (args.speculative_draft_attention_backend, args.prefill_attention_backend, args.attention_backend)
    return next(filter(None, asked), None)


def _waits(machine: Machine) -> Finding:
    """FlashInfer's plan without waits is for one kind of layer (``flashinfer_backend.py``, ``dispatch_reason``)."""
    other = "fa3" if machine.capability is not None and machine.capability[0] in _MAJORS["fa3"] else "triton"
    return Finding(
        "warn",
        "drafter's attention backend",
        "flashinfer, for a drafter with sliding layers: the host waits for the device three times a step",
        expected="a backend that plans without waits",
        remedy=f"set --speculative-draft-attention-backend {other}",
    )


def _backend(option: str, name: str, gpu: str, capability: tuple[int, int], limited: bool) -> str:
    major, minor = capability
    if major in _MAJORS.get(name, {major}) and not (limited and name not in _HYBRID_ON_BLACKWELL):
        return f"{name} on {gpu}"
    best = default_backend(major)
    raise DFlashError(
        f"{option} {name} on {gpu} (compute capability {major}.{minor})",
        expected=f"a backend that this GPU can run: {best}, flashinfer or triton",
        remedy=f"set {option} {best}",
    )


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
