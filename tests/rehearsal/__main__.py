"""Rehearse the GPU path on this CPU, two scenarios at a time, and print a table."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from concurrent.futures import ThreadPoolExecutor

from tabulate import tabulate

from tests.rehearsal.run import Outcome, differences, run
from tests.rehearsal.scenarios import SCENARIOS, Scenario

HEADERS = ("scenario", "pair", "kernels: ours", "SGLang's", "nodes: target", "drafter", "replays", "eager", "seconds")


def row(scenario: Scenario, found: Outcome) -> tuple[object, ...]:
    seen, met = found.report, found.report["met"]
    launched = [name for name in met if name.startswith("launches: ")]
    ours = sum(name.startswith("launches: sglang_dflash.") for name in launched)
    nodes = (
        max((graph["nodes"] for name, graph in seen["graphs"].items() if role in name), default=0)
        for role in ("target", "drafter")
    )
    counts = (sum(n for name, n in met.items() if name.startswith(part)) for part in ("replays: ", "eager: "))
    return (scenario.name, scenario.pair, ours, len(launched) - ours, *nodes, *counts, round(found.seconds))


def main() -> None:
    parser = ArgumentParser(prog="python -m tests.rehearsal", description=__doc__)
    parser.add_argument("parts", nargs="*", default=[""], metavar="PART", help="part of a name; default: all scenarios")
    asked = parser.parse_args().parts
    chosen = [scenario for scenario in SCENARIOS if any(part in scenario.name for part in asked)]
    rows, failed = [], False
    with ThreadPoolExecutor(2) as pool:
        jobs = [[pool.submit(run, scenario, rehearse=rehearse) for rehearse in (True, False)] for scenario in chosen]
        for scenario, job in zip(chosen, jobs, strict=True):
            found, expected = (each.result() for each in job)
            if found.report:
                rows.append(row(scenario, found))
            lines = differences(scenario, expected, found)
            failed |= bool(lines)
            print("DIFFERENT:" if lines else "same:", scenario.name, *lines, sep="\n  ", file=sys.stderr, flush=True)
    print(tabulate(rows, headers=HEADERS, tablefmt="github"))
    sys.exit(failed)


if __name__ == "__main__":
    main()
