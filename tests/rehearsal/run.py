"""Run a scenario on both platforms and compare the answers."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils._pytree import tree_leaves

from tests.rehearsal.backends import ATTENTION, DRAFT_ATTENTION
from tests.rehearsal.scenarios import Scenario
from tests.support import preloaded
from tests.support.servers import with_refusals

ROOT = Path(__file__).parents[2]
SECONDS = 1800
LOGPROB_ROUNDING = 1e-4  # kernels add up in another order
# Kernels that a step launches outside of graphs: ours, and those of SGLang that it calls there.
OF_STEPS = (
    *("sglang_dflash.", "sglang.kernels.ops.mamba.mamba_state_scatter_triton."),
    "sglang.srt.mem_cache.allocation.assign_req_to_token_pool",
)
# An engine that fails ends at once, instead of looking for a GPU's core dump for a minute.
FAILS_AT_ONCE = {"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"}


@dataclass(frozen=True)
class Outcome:
    """An engine's answers, or its error.

    Attributes:
        answers: per call, one per prompt.
        report: what a rehearsal met (:mod:`tests.rehearsal.report`).
        error: the last lines of its log if it failed.
    """

    answers: list[list[dict[str, Any]]]
    report: dict[str, Any]
    error: str = ""


def rehearsed() -> dict[str, str]:
    """Return the environment of a process that rehearses."""
    path = (str(ROOT), str(ROOT / "tests" / "rehearsal" / "plugin"), os.environ.get("PYTHONPATH"))
    return {**FAILS_AT_ONCE, "PYTHONPATH": os.pathsep.join(filter(None, path)), "TRITON_INTERPRET": "1"}


def run(scenario: Scenario, *, rehearse: bool) -> Outcome:
    """Run the scenario's engine in a separate process, on the torch platform or in a rehearsal.

    Without ``rehearse`` it is plain decoding, rehearsed, if the scenario is compared with that.
    """
    plain, rehearse = scenario.plain and not rehearse, rehearse or scenario.plain
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **FAILS_AT_ONCE, **scenario.environment}
    if rehearse:
        environment |= {**rehearsed(), ATTENTION: scenario.attention, DRAFT_ATTENTION: scenario.draft_attention}
    environment = with_refusals(environment)
    asked = {"keywords": scenario.keywords(plain=plain, rehearse=rehearse), "requests": scenario.requests}
    ended = preloaded.run("-m", "tests.support.run_engine", json.dumps(asked), environment=environment, timeout=SECONDS)
    if ended.returncode:
        return Outcome([], {}, error=ended.stderr[-8000:] or f"exit code {ended.returncode}")
    printed = json.loads(ended.stdout.splitlines()[-1])
    return Outcome(printed["answers"], printed["state"].get("rehearsal", {}))


def both(scenario: Scenario) -> tuple[Outcome, Outcome]:
    """Run the scenario on the torch platform and in a rehearsal, at the same time."""
    with ThreadPoolExecutor(2) as pool:
        expected, found = (pool.submit(run, scenario, rehearse=rehearse) for rehearse in (False, True))
        return expected.result(), found.result()


def differences(scenario: Scenario, expected: Outcome, found: Outcome) -> list[str]:
    """Return what a rehearsal did differently from the torch platform, or did not meet."""
    failed = [f"{name}: {each.error}" for name, each in (("torch", expected), ("rehearsal", found)) if each.error]
    if failed:
        return failed
    missing = [f"not met: {name}" for name in scenario.met if not found.report["met"].get(name)]
    missing += [f"compiled late: {key}" for key in found.report["compiled late"] if key.startswith(OF_STEPS)]
    calls = zip(expected.answers, found.answers, strict=True)
    pairs = [pair for call in calls for pair in zip(*call, strict=True)]
    return missing + [line for row, pair in enumerate(pairs) for line in _different(scenario, row, *pair)]


def _different(scenario: Scenario, row: int, expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    lines = []
    if expected["output_ids"] != found["output_ids"]:
        lines.append(f"answer {row}: tokens {found['output_ids']}, expected {expected['output_ids']}")
    infos = expected["meta_info"], found["meta_info"]
    blocks = [(info.get("spec_verify_ct"), info.get("spec_correct_drafts_histogram")) for info in infos]
    if scenario.same_blocks and not scenario.plain and blocks[0] != blocks[1]:
        lines.append(f"answer {row}: blocks, accepted drafts {blocks[1]}, expected {blocks[0]}")
    names = ("output_token_logprobs", *(["output_top_logprobs"] if scenario.exact else []))
    leaves = [tree_leaves([info.get(name, []) for name in names]) for info in infos]
    logprobs = [[value for value in each if isinstance(value, float)] for each in leaves]
    rounding = 0.0 if scenario.exact else LOGPROB_ROUNDING
    if any(abs(one - other) > rounding for one, other in zip(*logprobs, strict=True)):
        lines.append(f"answer {row}: log-probabilities {logprobs[1]}, expected {logprobs[0]}")
    return lines
