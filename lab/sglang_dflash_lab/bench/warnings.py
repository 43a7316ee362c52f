"""Findings that a reader of a report must not overlook, as sentences."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from sglang_dflash_lab.bench.modes import AR
from sglang_dflash_lab.bench.summary import Row, Summary

# A run on a machine with this much more to do than cores measures the other work, too.
BUSY = 1.5


@dataclass(frozen=True)
class Finding:
    """``serious``: the arm is wrong or loses; else something that widens the error of the figures."""

    serious: bool
    text: str


def findings(summary: Summary) -> list[Finding]:
    """Serious ones first: answers that differ from plain decoding, arms slower than it, then a busy machine."""
    found = [Finding(True, text) for mode in summary.modes if mode != AR for text in _of_arm(summary, mode)]
    cores = summary.results.provenance[-1]["hardware"]["cores"]
    load = max(row.load for row in summary.rows)
    if load > BUSY * cores:
        busy = f"the machine was busy: load average up to {load:.1f} before a run, on {cores} CPU core(s)"
        found.append(Finding(False, busy))
    return found


def _of_arm(summary: Summary, mode: str) -> Iterator[str]:
    rows = [row for row in summary.rows if row.mode == mode]
    different = sum(row.compared - row.equal for row in rows)
    if different:
        compared, first = sum(row.compared for row in rows), min(summary.first_differences(mode))
        answers = f"{different} of {compared} answers differ from plain decoding on the same prompt"
        yield f"{mode}: {answers}, the earliest at output token {first}"
    slower = ", ".join(f"{row.task} at c={row.concurrency} ({row.speed_up:.2f}x)" for row in rows if _slower(row))
    if slower:
        yield f"{mode} is slower than plain decoding: {slower}"
    for row in rows:
        plain = summary.row(AR, row.task, row.concurrency)
        if plain and row.accuracy < plain.accuracy - 2 * _standard_error(plain):
            right = f"right in {100 * row.accuracy:.0f} %, plain decoding in {100 * plain.accuracy:.0f} %"
            yield f"{mode} answers {row.task} at c={row.concurrency} {right}"


def _slower(row: Row) -> bool:
    """The interval lies below 1, or the ratio does if there are too few repeats for an interval."""
    return (row.speed_up if math.isnan(row.speed_up_high) else row.speed_up_high) < 1


def _standard_error(row: Row) -> float:
    """Of the accuracy, as a binomial share of the questions asked in one repeat."""
    return math.sqrt(row.accuracy * (1 - row.accuracy) * row.repeats / row.requests)
