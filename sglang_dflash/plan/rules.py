"""Every rule of the preflight, in one order, for one pair on one machine.

A server that starts and ``sglang-dflash check`` apply the same rules. The rules on backends are those of SGLang
0.5.23's ``layers/attention/attention_registry.py`` and ``arg_groups/attention_hook.py``, some of which it applies only
after loading.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sglang_dflash.drafter.config import text_config
from sglang_dflash.errors import DFlashError, Doubt
from sglang_dflash.plan.advice import HIGHEST_FRACTION, Advice, Adviser, Mix, fractions, highest_fraction
from sglang_dflash.plan.findings import Finding, judge, of_error
from sglang_dflash.plan.machine import Machine, size
from sglang_dflash.plan.memory import MemoryTable
from sglang_dflash.plan.pair import Pair
from sglang_dflash.plan.pair_rules import pair_findings
from sglang_dflash.plan.plan import decide, reason_for_builtin
from sglang_dflash.plan.pools import FLOOR, Outside, default_backend, fit
from sglang_dflash.plan.serving import ServingPlan
from sglang_dflash.plan.settings import SWITCH, Settings, flag_of

# Backend -> major compute capabilities that can run it; the others run everywhere.
_MAJORS = {"fa3": {8, 9}, "fa4": {9, 10, 11}, "trtllm_mha": {9, 10, 12}}
_HYBRID_ON_BLACKWELL = {"triton", "trtllm_mha", "flashinfer", "fa4"}
_TARGET_BACKENDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
_NO_DEVICE = "no GPU here; use --gpu or --memory-gib to check another machine"


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


def preflight(settings: Settings, machine: Machine, mix: Mix | None = None) -> Report:
    """Check a command line.

    Args:
        machine: what will serve.
        mix: the load that it should hold at once; None if the user did not state one.
    """
    words = judge("settings", settings.validate)
    if words.level == "error":
        return Report([words])
    if settings.wants_builtin:
        return Report([judge(SWITCH, _switch)])
    try:
        pair = Pair.of(settings)
    except DFlashError as raised:
        return Report([words, of_error("configuration", raised)])
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
    except DFlashError as raised:
        return Report([*findings, of_error("flags", raised)])
    if plan.memory is None or not plan.memory.static_bytes:
        return Report([*findings, *check_memory(plan)], plan)
    adviser = Adviser(settings, machine, pair, plan.memory)
    advice = adviser.more_requests()
    findings += check_memory(plan, advice)
    if mix is not None:
        about = f"{mix.users} users of {mix.context} tokens"
        findings.append(replace(judge(about, _mix, settings, machine, pair, plan.memory, adviser, mix), estimated=True))
    return Report(findings, plan, advice, adviser.more_prefixes())


def check_rules(settings: Settings, pair: Pair, machine: Machine) -> list[Finding]:
    """Findings on a command line, from configurations, headers and small files.

    Args:
        machine: what will serve.
    """
    findings = [
        judge("settings", settings.validate),
        judge("drafter", _drafter_path, settings),
        judge("block flags", _block_flags, settings),
        judge("pipeline parallelism", _pipeline, settings),
        judge("recurrent snapshots", _track_interval, settings),
    ]
    if findings[0].level == "error":
        return findings[:1]  # no number can be computed from it
    if not settings.speculative_draft_model_path:
        return findings
    try:
        if machine.kind == "gpu" and pair.kind:
            raise Doubt(
                f"the drafter is of the kind {pair.kind}",
                expected="a plain DFlash drafter",
                remedy="none needed on a GPU: SGLang's own worker serves it, without this package's features",
            )
        findings += pair_findings(settings, pair)
    except DFlashError as raised:
        return [*findings, of_error("configuration", raised)]
    slides = pair.drafter.sliding_window is not None
    findings += check_backends(settings, machine, hybrid=pair.hybrid, slides=slides, cuda=torch_cuda())
    findings.append(judge("target's quantisation", _quantisation, settings.quantization, pair.target))
    if pair.hybrid:
        strategy = settings.mamba_radix_cache_strategy
        findings.append(judge("recurrent snapshots for the prefix cache", _strategy, strategy))
    return findings


def _switch() -> str:
    raise Doubt(
        f"{SWITCH}=builtin: SGLang's own worker serves, and nothing is checked for it",
        expected=f"{SWITCH} unset",
        remedy=f"unset {SWITCH} to check this package's worker",
    )


def _drafter_path(settings: Settings) -> str:
    if settings.speculative_draft_model_path:
        return settings.speculative_draft_model_path
    raise DFlashError(
        "--speculative-algorithm DFLASH without --speculative-draft-model-path",
        expected="the drafter's path or hub id",
        remedy="set --speculative-draft-model-path; the drafter's card names its target",
    )


def _block_flags(settings: Settings) -> str:
    tokens, block = settings.speculative_num_draft_tokens, settings.speculative_dflash_block_size
    if tokens is None or block is None or tokens == block:
        return str(settings.block or "from the drafter")
    raise DFlashError(
        f"--speculative-num-draft-tokens {tokens} and --speculative-dflash-block-size {block}",
        expected="one value: both are the block size",
        remedy="keep one of the two flags",
    )


def _pipeline(settings: Settings) -> str:
    if settings.pp_size == 1:
        return "1"
    raise DFlashError(
        f"--pp-size {settings.pp_size}",
        expected="1: a draft needs hidden states of the whole target",
        remedy="use --tp-size instead",
    )


def _track_interval(settings: Settings) -> str:
    block, interval = settings.block, settings.mamba_track_interval
    if block is None or interval is None or interval >= block:
        return f"every {interval} tokens"
    raise DFlashError(
        f"--mamba-track-interval {interval}, block size {block}",
        expected="at most one snapshot per block",
        remedy=f"set --mamba-track-interval to {block} or more; 256 is SGLang's default",
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


def _strategy(strategy: str) -> str:
    if strategy != "no_buffer":
        return strategy
    raise Doubt(
        "--mamba-radix-cache-strategy no_buffer",
        expected="extra_buffer: no_buffer turns overlap scheduling off and forces pages of one token",
        remedy="set --mamba-radix-cache-strategy extra_buffer",
    )


def check_backends(
    settings: Settings, machine: Machine, *, hybrid: bool, slides: bool = False, cuda: str | None = None
) -> Iterator[Finding]:
    """Findings on the backends of a command line.

    Args:
        machine: what serves; without a known compute capability nothing is checked.
        hybrid: whether the target has recurrent layers.
        slides: whether the drafter has sliding layers.
        cuda: the CUDA version of the torch that serves, if ``machine`` is this one; None if unknown.
    """
    if slides and settings.draft_backend == "flashinfer":
        yield _syncs(machine)
    asked = {
        name: value
        for name in (*_TARGET_BACKENDS, "speculative_draft_attention_backend")
        if (value := getattr(settings, name))
    }
    if machine.capability is None:
        names = ", ".join(asked.values()) or "chosen by SGLang"
        known = f"{names}; not checked against {machine.name}: no compute capability is known"
        yield Finding("ok", "backends", known)
        return
    for name, value in asked.items():
        limited = hybrid and machine.is_blackwell and name in _TARGET_BACKENDS
        yield judge(flag_of(name), _backend, flag_of(name), value, machine.name, machine.capability, limited)
    if (flag := settings.flashinfer_states(machine)) is not None and settings.mamba_ssm_dtype != "bfloat16":
        yield judge("recurrent state's dtype", _bfloat16_states, flag, settings.mamba_ssm_dtype, machine)
    prefill = settings.linear_attn_prefill_backend or settings.linear_attn_backend
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


def _syncs(machine: Machine) -> Finding:
    """FlashInfer plans without a sync for one kind of layer only (``flashinfer_backend.py``, ``dispatch_reason``)."""
    other = "fa3" if machine.capability is not None and machine.capability[0] in _MAJORS["fa3"] else "triton"
    return Finding(
        "warn",
        "drafter's attention backend",
        "flashinfer, for a drafter with sliding layers: the host waits for the device three times per step",
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


def check_memory(plan: ServingPlan, advice: Sequence[Advice] = ()) -> Iterator[Finding]:
    """Findings on the plan's expected memory. All but the weights are estimates: a server warns of them and starts."""
    if plan.unsized is not None:
        yield replace(of_error("memory", plan.unsized), estimated=True)
    if (memory := plan.memory) is not None:
        if memory.static_bytes and len(memory.ways) > 1:
            yield Finding("ok", f"states {'replayed' if memory.ways[0].replay else 'kept'}", _both_ways(memory))
        if memory.static_bytes and memory.demand.weighed:
            yield judge("weights", _weights, memory)
        yield replace(judge("running requests", _running, memory, advice), estimated=True)
        if memory.outside is not None:
            yield replace(judge("memory outside the static fraction", _outside, memory, memory.outside), estimated=True)


def _both_ways(memory: MemoryTable) -> str:
    kept, replayed = sorted(memory.ways, key=lambda pools: pools.replay)
    return (
        f"{size(replayed.scratch)} of scratch per request if replayed ({replayed.running} of {kept.asked} fit), "
        f"{size(kept.scratch)} if kept ({kept.running} fit)"
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


def _running(memory: MemoryTable, advice: Sequence[Advice]) -> str:
    served, demand = memory.ways[0], memory.demand
    if memory.static_bytes == 0:
        return _NO_DEVICE
    if served.running >= demand.max_running:
        return f"{demand.max_running} at once, with {served.tokens} tokens of K/V in total"
    if served.running == 0:
        raise DFlashError(
            f"weights and one request need more than the {size(memory.static_bytes)} of static memory",
            expected=f"more than {size(demand.weights)}",
            remedy="use more GPUs (--tp-size), a larger --mem-fraction-static or a quantised target",
        )
    more = [
        f"{each.flag} ({each.running} fit, {each.tokens} tokens of K/V)"
        for each in advice or _larger_fraction(memory)
        if each.running > served.running
    ]
    raise Doubt(
        f"only {served.running} of {demand.max_running} requests (--max-running-requests) fit at once, with "
        f"{served.tokens} tokens of K/V in total",
        expected=f"memory for {demand.max_running} requests; limited by {served.capped_by}",
        remedy=f"set {', or '.join(more)}" if more else "use more or larger GPUs, or accept the smaller number",
    )


def _larger_fraction(memory: MemoryTable) -> list[Advice]:
    """The static fraction that a launch advises: the smallest that lets all requests run, or else the largest."""
    device, replay = memory.static_bytes / memory.fraction, memory.ways[0].replay
    highest = highest_fraction(memory.fraction, memory.outside, int(device))
    found = []
    for flag, value in fractions(memory.fraction, highest):
        pools = fit(memory.demand, device * value, replay=replay)
        found = [Advice(flag, pools.running, pools.tokens)]
        if pools.running >= memory.demand.max_running:
            break
    return found


def _mix(settings: Settings, machine: Machine, pair: Pair, memory: MemoryTable, adviser: Adviser, mix: Mix) -> str:
    served = memory.ways[0]
    kept = f"{mix.held_by(served)} contexts kept"
    if mix.served_by(served) and mix.held_by(served) >= mix.conversations:
        return f"served; {kept}"
    if split := adviser.split(mix):
        remedy = f"set {split}"
    else:
        remedy = "nothing serves them here"
        if (most := adviser.most(mix)) is not None:
            remedy += f": at most {most.pools.running} users with {most}"
        for flag, changes in (
            (f"--tp-size {2 * settings.tp_size}", {"tp_size": 2 * settings.tp_size}),
            ("--kv-cache-dtype fp8_e4m3", {"kv_cache_dtype": "fp8_e4m3"}),
        ):
            changed = replace(settings, **changes)
            if wider := Adviser(changed, machine, pair, memory).split(mix):
                remedy += f"; or {flag} {wider}"
    contexts = max(mix.users, mix.conversations)
    wanted = f"{mix.users} at once, {contexts * mix.context} tokens of K/V"
    raise Doubt(
        f"{served.running} at once, with {served.tokens} tokens of K/V in total; {kept}",
        expected=f"{wanted}, {mix.conversations} contexts kept" if mix.conversations else wanted,
        remedy=remedy,
    )


def _outside(memory: MemoryTable, outside: Outside) -> str:
    taken, sets = outside.sampling + outside.buffers, "1 set" if outside.sets == 1 else f"{outside.sets} sets"
    needs = f"sampling {size(outside.sampling)}, attention buffers of {sets} of graphs {size(outside.buffers)}"
    if outside.left >= FLOOR:
        return f"{needs}; {size(outside.left)} left for activations and graphs"
    whole = memory.static_bytes + taken + outside.left
    lower = math.floor(100 * (whole - taken - FLOOR) / whole) / 100
    fewer = "fewer requests or a shorter --context-length"
    raise Doubt(
        f"{needs}; {size(max(0, outside.left)) or 'nothing'} left for activations and graphs",
        expected=f"{size(FLOOR)} or more",
        remedy=f"set --mem-fraction-static {lower:.2f}, {fewer}" if lower > 0 else f"set {fewer}",
    )
