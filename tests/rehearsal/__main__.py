"""``python -m tests.rehearsal [PART OF A NAME ...]``: rehearses scenarios, two processes at a time; prints a table."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

from tabulate import tabulate

from tests.rehearsal.run import Outcome, differences, run
from tests.rehearsal.scenarios import SCENARIOS, Scenario

HEADERS = ("scenario", "pair", "kernels: ours", "SGLang's", "nodes: target", "drafter", "replays", "eager", "seconds")


def row(scenario: Scenario, found: Outcome) -> tuple[object, ...]:
    """A line of the table."""
    seen = found.report
    ours = sum(name.startswith("sglang_dflash.") for name in seen["launches"])
    kernels = ours, len(seen["launches"]) - ours
    nodes = (
        max((graph["nodes"] for name, graph in seen["graphs"].items() if role in name), default=0)
        for role in ("target", "drafter")
    )
    counts = (sum(seen[part].values()) for part in ("replays", "eager"))
    return (scenario.name, scenario.pair, *kernels, *nodes, *counts, round(found.seconds))


def main() -> None:
    asked = sys.argv[1:] or [""]
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
