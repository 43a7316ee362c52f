"""Replay recorded traffic through the adaptive policy: ``python -m tests.width.regret``.

The table shows the policy's speed over that of the width that is best in hindsight for each phase of 100 steps. A
recording (:mod:`tests.width.record`) has each width's accept length at every position of some answers. So the time that
a fixed width would have taken for the text that the policy committed is known exactly: no luck of other prompts enters.
Of six widths on one short text the best is partly luck, so each phase's times are summed over seeds before its best
width is chosen. What is left of this luck favours the fixed widths.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from random import Random

from sglang_dflash.width import WidthPolicy
from sglang_dflash.width.policy import BUCKET, BUCKETS
from tests.width.traffic import WIDTHS, Machine, adaptive

FOLDER = Path(__file__).parents[1] / "fixtures" / "traffic"
PHASE, SEEDS = 100, 6
CHANGING = ("easy", "babble", "edits", "chat", "repeats", "questions")
STEADY = (*CHANGING, "never")
RATIOS = (1.5, 3.0, 8.0)


@dataclass(frozen=True)
class Request:
    """One answer, by position: length of the match; by width, accept length and a fixed width's steps to the end."""

    match: list[int]
    lens: dict[int, list[int]]
    left: dict[int, list[int]]

    @classmethod
    def of(cls, match: list[int], lens: dict[int, list[int]]) -> Request:
        left = {}
        for width, accepted in lens.items():
            left[width] = steps = [0] * (len(match) + 1)
            for position in reversed(range(len(match))):
                steps[position] = 1 + steps[min(position + accepted[position], len(match))]
        return cls(match, lens, left)


@cache
def recording(traffic: str) -> list[Request]:
    """Read the requests of a recorded traffic; ``never`` accepts no draft."""
    if traffic == "never":
        return [Request.of([0] * 64, {width: [1] * 64 for width in WIDTHS})]
    found = []
    for each in json.loads((FOLDER / f"{traffic}.json").read_text()):
        match = [int(digit, 17) for digit in each.pop("match")]
        lens = {int(width): [int(digit, 17) for digit in text] for width, text in each.items()}
        found.append(Request.of(match, {1: [1] * len(match), **lens}))
    return found


class Slot:
    """One of the batch's requests, and what the host has read of its matches: with overlap, one step late."""

    def __init__(self, requests: Sequence[Request], random: Random) -> None:
        self._requests, self._random = requests, random
        self._begin()
        self.position = random.randrange(len(self.request.match))

    def _begin(self) -> None:
        self.request = self._random.choice(self._requests)
        self.position = self.bucket = self._steps = 0

    def advance(self, width: int) -> tuple[int, dict[int, int]]:
        """Commit a block; return its accept length and the steps that each fixed width would take for it."""
        request, start = self.request, self.position
        length = request.lens[width][start]
        self.position = min(start + length, len(request.match))
        saved = {fixed: left[start] - left[self.position] for fixed, left in request.left.items()}
        self._steps += 1
        # The match of a prefill stays unknown; that of a step is known one step later.
        self.bucket = request.match[start] // BUCKET if self._steps > 1 else 0
        if self.position == len(request.match):
            self._begin()
        return length, saved


@dataclass
class Phase:
    """Milliseconds: of the policy, and of each fixed width for the same text."""

    taken: float
    fixed: dict[int, float]

    def over(self, width: int | None = None) -> float:
        """Speed over that of a fixed width, or of the best one."""
        return (min(self.fixed.values()) if width is None else self.fixed[width]) / self.taken

    @classmethod
    def sum(cls, phases: Sequence[Phase]) -> Phase:
        return cls(sum(p.taken for p in phases), {w: sum(p.fixed[w] for p in phases) for w in phases[0].fixed})


def replay(policy: WidthPolicy, machine: Machine, phases: Sequence[tuple[str, int]], seed: int) -> list[Phase]:
    """Let a policy choose the widths of ``phases``: each a traffic and a batch size. It observes a step late."""
    random, late, results = Random(seed), None, []
    for traffic, size in phases:
        slots = [Slot(recording(traffic), random) for _ in range(size)]
        result = Phase(0.0, dict.fromkeys(policy.widths, 0.0))
        results.append(result)
        for _ in range(PHASE):
            buckets = [slot.bucket for slot in slots]
            width = policy.width(size, [buckets.count(k) for k in range(BUCKETS)])
            if late is not None:
                policy.observe(*late)
            lengths, saved = zip(*(slot.advance(width) for slot in slots), strict=True)
            late = (width, lengths, buckets)
            policy.observe_time(size, width, machine.measured(size, width, random))
            result.taken += machine.milliseconds(size, width)
            for fixed in policy.widths:
                result.fixed[fixed] += sum(each[fixed] for each in saved) / size * machine.milliseconds(size, fixed)
    return results


def phases_of(traffic: str, size: int) -> list[tuple[str, int]]:
    """8 phases of a traffic; 18 of ``mixed``, which changes it every three."""
    return [(each, size) for each in CHANGING for _ in range(3)] if traffic == "mixed" else [(traffic, size)] * 8


def regret(machine: Machine, phases: Sequence[tuple[str, int]], seeds: int = SEEDS) -> list[Phase]:
    """Return the phases, each summed over seeds, of a policy that starts anew with each seed."""
    runs = [replay(adaptive(machine), machine, phases, seed) for seed in range(seeds)]
    return [Phase.sum(phase) for phase in zip(*runs, strict=True)]


def over_best(phases: Sequence[Phase]) -> float:
    """Speed of all phases over that of each phase's best width."""
    return sum(min(phase.fixed.values()) for phase in phases) / sum(phase.taken for phase in phases)


def main() -> None:
    ArgumentParser(prog="python -m tests.width.regret", description=__doc__).parse_args()
    print("| traffic | users |", " | ".join(f"{ratio:g}" for ratio in RATIOS), "| worst phase, from the second |")
    print("|---|---|" + "---|" * (len(RATIOS) + 1))
    for traffic, size in product((*STEADY, "mixed"), (1, 8)):
        found = [regret(Machine(ratio), phases_of(traffic, size)) for ratio in RATIOS]
        worst = min(phase.over() for phases in found for phase in phases[1:])
        cells = " | ".join(f"{over_best(each):.3f}" for each in found)
        print(f"| {traffic} | {size} | {cells} | {worst:.3f} |", flush=True)


if __name__ == "__main__":
    main()
