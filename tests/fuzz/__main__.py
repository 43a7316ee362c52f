"""``python -m tests.fuzz``: more than 100,000 inputs, one table; a finding makes the exit status 1."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything reads it

from tests.fuzz.judge import limit_memory
from tests.fuzz.part import Outcome, run

MODULES = ["drafters", "checkpoints", "flags", "embeddings", "requests"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="of the inputs of a full run")
    parser.add_argument("--seed", type=int, default=0, help="another one makes other inputs")
    parser.add_argument("modules", nargs="*", default=MODULES, help=f"of {', '.join(MODULES)}; all by default")
    options = parser.parse_args()
    logging.disable()
    outcomes = []
    modules = [importlib.import_module(f"tests.fuzz.{name}") for name in options.modules]
    with tempfile.TemporaryDirectory() as folder:
        parts = [part for module in modules for part in module.parts(Path(folder) / module.__name__.rpartition(".")[2])]
        limit_memory()
        print(f"| {'what':<34} | inputs | refused | CPU s | findings |\n|---|---|---|---|---|", flush=True)
        for part in parts:
            outcomes.append(run(part, max(1, int(part.share * options.share)), options.seed))
            print(_row(outcomes[-1]), flush=True)
    findings = [finding for outcome in outcomes for finding in outcome.judge.findings]
    inputs, seconds = sum(each.judge.inputs for each in outcomes), sum(each.seconds for each in outcomes)
    print(f"| {'together':<34} | {inputs} | | {seconds:.0f} | {len(findings)} |")
    for outcome in outcomes:
        for finding in outcome.judge.findings:
            print(f"- {outcome.part.name}: {finding}")
    return 1 if findings else 0


def _row(outcome: Outcome) -> str:
    judge = outcome.judge
    counts = f"{judge.inputs} | {judge.refused} | {outcome.seconds:.1f} | {len(judge.findings)}"
    return f"| {outcome.part.name:<34} | {counts} |"


if __name__ == "__main__":
    sys.exit(main())
