"""``sglang-dflash check`` without its command line: the rules, then the plan that a server would serve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_dflash.check.findings import Finding, of_error
from sglang_dflash.check.rules import check_memory, check_rules
from sglang_dflash.errors import DFlashError
from sglang_dflash.memory.machine import Machine
from sglang_dflash.memory.sizes import is_hybrid
from sglang_dflash.plan.decide import decide
from sglang_dflash.plan.memory import MemoryTable
from sglang_dflash.plan.pair import read_pair
from sglang_dflash.plan.serving import ServingPlan


@dataclass(frozen=True)
class Report:
    """Findings in the order of the rules, and the plan unless something stops the pair before."""

    findings: list[Finding]
    plan: ServingPlan | None = None

    @property
    def memory(self) -> MemoryTable | None:
        return None if self.plan is None else self.plan.memory


def preflight(args: Any, machine: Machine) -> Report:
    """Check a command line.

    Args:
        args: server arguments by SGLang's names.
        machine: what will serve.
    """
    findings = check_rules(args, machine)
    if not args.speculative_draft_model_path or any(finding.level == "error" for finding in findings):
        return Report(findings)  # sizes of a pair that does not fit together mean nothing
    if any(finding.about == "configuration" for finding in findings):
        return Report(findings)  # left to SGLang's own worker
    try:
        plan = decide(args, machine, hybrid=is_hybrid(read_pair(args).target))
    except DFlashError as raised:
        return Report([*findings, of_error("flags", raised)])
    return Report([*findings, *check_memory(plan)], plan)
