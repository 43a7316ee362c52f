"""Synthetic traffic with a known optimum: hazards of the drafts, and a cost model after the offline width study."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from sglang_dflash.width import AdaptiveWidth, CostTable, WidthPolicy
from sglang_dflash.width.policy import BUCKETS

WIDTHS = (1, 2, 4, 8, 16)
PLAIN_MS = 10.0


@dataclass
class Machine:
    """A step of 16 verified tokens takes ``ratio`` times one of 1; the drafter adds a tenth of it."""

    ratio: float
    noise: float = 0.05

    def milliseconds(self, batch_size: int, width: int) -> float:
        verify = 1 + (self.ratio - 1) * (width - 1) / 15
        return PLAIN_MS * (1 + 0.02 * batch_size) * verify * (1.1 if width > 1 else 1.0)

    def measured(self, batch_size: int, width: int, random: Random) -> float:
        return self.milliseconds(batch_size, width) * random.lognormvariate(0, self.noise)

    def points(self, batch_sizes: Sequence[int] = (1, 8, 32), widths: Sequence[int] = WIDTHS) -> dict:
        return {(size, width): self.milliseconds(size, width) for size in batch_sizes for width in widths}


def adaptive(machine: Machine, widths: Sequence[int] = WIDTHS, block: int | None = None) -> AdaptiveWidth:
    """Return the adaptive policy that starts with the costs of a machine."""
    return AdaptiveWidth(CostTable(machine.points(widths=widths)), block)


def accept_len(chance: float, width: int, random: Random) -> int:
    """A request's accepted drafts of one step plus bonus; ``chance`` is that of each draft."""
    return next((length for length in range(1, width) if random.random() >= chance), width)


def yields(hazard: float, width: int) -> float:
    """Tokens of a step: 1 + hazard + hazard ** 2 + ..."""
    return sum(hazard**j for j in range(width))


def rate(machine: Machine, hazard: float, batch_size: int, width: int) -> float:
    """Tokens per millisecond and request."""
    return yields(hazard, width) / machine.milliseconds(batch_size, width)


def best_width(machine: Machine, hazard: float, batch_size: int) -> int:
    return max(WIDTHS, key=lambda width: rate(machine, hazard, batch_size, width))


@dataclass
class Run:
    """The steps of a policy; tokens are the expected ones of its widths, so that luck does not count."""

    widths: list[int] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    milliseconds: list[float] = field(default_factory=list)

    def rate(self, start: int = 0) -> float:
        return sum(self.tokens[start:]) / sum(self.milliseconds[start:])


def drive(
    policy: WidthPolicy,
    machine: Machine,
    hazard: Callable[[int], float],
    steps: int,
    size: int,
    seed: int = 0,
    bucket: int = 0,
) -> Run:
    """Let a policy choose ``steps`` widths, each for ``size`` requests that all have a match of this ``bucket``.

    It observes a step after the next one has started.
    """
    random, run, late = Random(seed), Run(), None
    for step in range(steps):
        chance = hazard(step)
        width = policy.width(size, [size * (each == bucket) for each in range(BUCKETS)])
        if late is not None:
            policy.observe(*late)
        late = (width, [accept_len(chance, width, random) for _ in range(size)], [bucket] * size)
        policy.observe_time(size, width, machine.measured(size, width, random))
        run.widths.append(width)
        run.tokens.append(yields(chance, width))
        run.milliseconds.append(machine.milliseconds(size, width))
    return run
