"""The whole preflight of one pair: findings, and the memory table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sglang_dflash.check.arguments import check_arguments, serving_of
from sglang_dflash.check.backends import check_backends
from sglang_dflash.check.findings import Finding, error, of_error, ok, warn
from sglang_dflash.check.pair import check_pair
from sglang_dflash.check.text import check_dtypes, check_text
from sglang_dflash.check.weights import check_weights
from sglang_dflash.drafter.config import DrafterConfig, foreign_kind, text_config
from sglang_dflash.drafter.files import ModelFiles
from sglang_dflash.errors import DFlashError
from sglang_dflash.memory.demand import MEM_FRACTION, demand
from sglang_dflash.memory.device import Device
from sglang_dflash.memory.fit import GIB, Demand, Fit, fit
from sglang_dflash.memory.parameters import FAMILIES, is_known
from sglang_dflash.memory.sizes import is_hybrid


@dataclass(frozen=True)
class MemoryTable:
    """What the pair takes and how SGLang would divide a device: bytes unless named otherwise."""

    device: str
    static_bytes: int
    demand: Demand
    fit: Fit


@dataclass(frozen=True)
class Report:
    """Findings in the order they were made, and the memory table where both configurations could be read."""

    findings: list[Finding]
    memory: MemoryTable | None

    @property
    def exit_code(self) -> int:
        """0 all well, 1 warnings, 2 errors."""
        levels = {finding.level for finding in self.findings}
        return 2 if "error" in levels else 1 if "warn" in levels else 0

    def as_json(self) -> str:
        return json.dumps(asdict(self) | {"exit_code": self.exit_code}, indent=2)


def preflight(
    args: Any, *, device: Device | None, notes: Sequence[str] = (), unread: Sequence[str] = (), memory_gib: float | None
) -> Report:
    """Check a pair for a server's flags, reading configurations, headers and small files only.

    Args:
        args: server arguments by SGLang's names (:mod:`sglang_dflash.check.options`).
        device: this machine's GPU, None without one.
        notes: old flags that were translated.
        unread: flags that nothing here looks at.
        memory_gib: memory to divide instead of the device's.
    """
    findings = [ok("old flag", note) for note in notes]
    if unread:
        findings.append(ok("flags not looked at", " ".join(unread)))
    findings += check_arguments(args)
    drafter_files = ModelFiles(args.speculative_draft_model_path, args.speculative_draft_model_revision)
    target_files = ModelFiles(args.model_path, args.revision)
    try:
        if device is not None and (kind := foreign_kind(drafter_files.config)):
            return Report([*findings, _left_to_sglang(kind)], None)
        target = {**target_files.config, **json.loads(args.json_model_override_args)}
        drafter = DrafterConfig.from_dict({**drafter_files.config, **json.loads(args.json_model_override_args)})
    except DFlashError as raised:
        return Report([*findings, of_error("configuration", raised)], None)
    findings.append(ok("architecture", f"{(target.get('architectures') or ['?'])[0]} + DFlashDraftModel"))
    findings += check_pair(drafter, target, serving_of(args))
    findings.append(check_weights(drafter, drafter_files.tensors()))
    findings += check_text(drafter, drafter_files, target_files)
    findings += check_dtypes(drafter, target, args.dtype)
    findings += check_backends(args, device, hybrid=is_hybrid(target))
    if is_hybrid(target):
        findings.append(_strategy(args))
    if any(finding.level == "error" for finding in findings):
        return Report(findings, None)  # sizes of a pair that does not fit together mean nothing
    if not is_known(target):
        return Report([*findings, _unknown_family(target)], None)
    needed = demand(args, drafter, drafter_files, target_files, device)
    memory = _memory(args, needed, device, memory_gib)
    if memory is not None:
        findings.append(_running(args, memory))
    return Report(findings, memory)


def _memory(args: Any, needed: Demand, device: Device | None, memory_gib: float | None) -> MemoryTable | None:
    if memory_gib is None and device is None:
        return MemoryTable("no GPU: sizes only", 0, needed, fit(needed, 0))
    total = memory_gib * GIB if memory_gib is not None else device.memory if device else 0.0
    static = int(total * (args.mem_fraction_static or MEM_FRACTION))
    name = f"{memory_gib:g} GiB" if memory_gib is not None else device.name if device else ""
    return MemoryTable(name, static, needed, fit(needed, static))


def _running(args: Any, memory: MemoryTable) -> Finding:
    about, fitted = "running requests", memory.fit
    if memory.static_bytes == 0:
        return ok(about, "no GPU here: --memory-gib divides another machine's")
    asked = memory.demand.max_running
    if fitted.running == 0:
        return error(
            about,
            f"{memory.static_bytes / GIB:.1f} GiB of static memory do not hold weights and one request",
            expected=f"more than {fitted.weights / GIB:.1f} GiB",
            remedy="use more GPUs (--tp-size), a larger --mem-fraction-static or a quantised target",
        )
    if fitted.running < asked:
        return warn(
            about,
            f"{fitted.running} fit at once, {asked} asked for",
            expected=f"memory for {asked}: each takes {_request_mib(memory.demand):.0f} MiB of recurrent state",
            remedy="lower the block size, set --mamba-ssm-dtype bfloat16, or accept the smaller number",
        )
    return ok(about, f"{asked} at once, {fitted.tokens} tokens of K/V between them")


def _request_mib(demand: Demand) -> float:
    return (demand.slots_per_request * demand.state.slot + demand.state.scratch(demand.block)) / (1 << 20)


def _left_to_sglang(kind: str) -> Finding:
    return warn(
        "architecture",
        f"the drafter is of the kind {kind}",
        expected="a plain DFlash drafter",
        remedy="none needed on a GPU: SGLang's own worker serves it, without what this package adds",
    )


def _unknown_family(target: Any) -> Finding:
    return warn(
        "memory",
        f"no sizes are known for targets of model_type {text_config(target).get('model_type')!r}",
        expected=f"one of {', '.join(sorted(FAMILIES))}",
        remedy="none needed: SGLang divides the memory when it starts",
    )


def _strategy(args: Any) -> Finding:
    about, strategy = "recurrent snapshots for the prefix cache", args.mamba_radix_cache_strategy
    if strategy == "no_buffer":
        return warn(
            about,
            "--mamba-radix-cache-strategy no_buffer",
            expected="extra_buffer: no_buffer turns overlap scheduling off and forces pages of one token",
            remedy="set --mamba-radix-cache-strategy extra_buffer",
        )
    return ok(about, strategy)
