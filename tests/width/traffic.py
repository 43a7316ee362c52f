"""Synthetic traffic with a known optimum: hazards of the drafts, and a cost model after the offline width study."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from sglang_dflash.width import CostTable, WidthPolicy

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


class Recorded(Machine):
    """Costs in milliseconds by (batch size, width), linear between batch sizes."""

    def __init__(self, points: dict[tuple[int, int], float]) -> None:
        super().__init__(0.0)
        self._table = CostTable(points)

    def milliseconds(self, batch_size: int, width: int) -> float:
        return self._table.row(batch_size)[self._table.widths.index(width)]


def accept_lens(hazard: Callable[[int], float], width: int, batch_size: int, random: Random) -> list[int]:
    """One step's accepted drafts plus bonus, per request; ``hazard(j)`` is the chance of draft j, from 1."""
    lengths = [1] * batch_size
    for request in range(batch_size):
        while lengths[request] < width and random.random() < hazard(lengths[request]):
            lengths[request] += 1
    return lengths


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

    def rate(self, start: int = 0, stop: int | None = None) -> float:
        return sum(self.tokens[start:stop]) / sum(self.milliseconds[start:stop])


def drive(
    policy: WidthPolicy,
    machine: Machine,
    hazard: Callable[[int], float],
    steps: int,
    batch_size: Callable[[int], int],
    seed: int = 0,
) -> Run:
    """Let a policy choose ``steps`` widths; it observes a step after the next one has started."""
    random, run, late = Random(seed), Run(), None
    for step in range(steps):
        size, chance = batch_size(step), hazard(step)
        width = policy.width(size, 0)
        if late is not None:
            policy.observe(*late)
        late = (width, accept_lens(lambda j, chance=chance: chance, width, size, random))
        policy.observe_time(size, width, machine.measured(size, width, random))
        run.widths.append(width)
        run.tokens.append(yields(chance, width))
        run.milliseconds.append(machine.milliseconds(size, width))
    return run


@dataclass(frozen=True)
class Copying:
    """Requests that repeat themselves.

    Args:
        drafted, copied: hazards of a drafted and of a copied block.
        share: of a request's steps that have a match.
        stays: steps that a stretch with matches lasts, on average.
        taken: share of the matches that the drafter does not override.
        block: widest block of the drafter.
    """

    drafted: float
    copied: float
    share: float = 0.5
    stays: float = 10.0
    taken: float = 0.8
    block: int = 16

    def next(self, matches: Sequence[bool], random: Random) -> list[bool]:
        """Which requests have a match after the next step, of those that had one: a Markov chain."""
        ends = 1 / self.stays
        begins = min(ends * self.share / max(1 - self.share, 1e-9), 1.0)
        return [random.random() >= ends if match else random.random() < begins for match in matches]

    def yields(self, width: int, matching: float) -> float:
        """Tokens of a row, if this share of the rows has a match."""
        copied = matching * self.taken
        return copied * yields(self.copied, width) + (1 - copied) * yields(self.drafted, min(width, self.block))

    def best(self, machine: Machine, widths: Sequence[int], batch_size: int, matching: float) -> float:
        """Tokens per millisecond and request of the best width."""
        return max(self.yields(width, matching) / machine.milliseconds(batch_size, width) for width in widths)


def drive_copying(
    policy: WidthPolicy, machine: Machine, traffic: Callable[[int], Copying], steps: int, batch_size: int,
    seed: int = 0, *, sees: bool = True,
) -> tuple[Run, list[float]]:  # fmt: skip
    """As :func:`drive`, with copies: return the run, and the tokens that the best widths yield in its time.

    Args:
        sees: whether the policy receives matches; otherwise only accept lengths.
    """
    random, run, ideal, late = Random(seed), Run(), [], None
    matches = [random.random() < traffic(0).share for _ in range(batch_size)]
    seen = [False] * batch_size
    for step in range(steps):
        now = traffic(step)
        width = policy.width(batch_size, 0, [batch_size - sum(seen), 0, sum(seen), 0, 0] if sees else ())
        if late is not None:
            policy.observe(*late)
        copied = [match and random.random() < now.taken for match in matches]
        lengths = [
            accept_lens(lambda _, hazard=now.copied if copy else now.drafted: hazard,
                        width if copy else min(width, now.block), 1, random)[0] for copy in copied
        ]  # fmt: skip
        late = (width, lengths, [2 * match for match in seen]) if sees else (width, lengths)
        policy.observe_time(batch_size, width, machine.measured(batch_size, width, random))
        matching = sum(matches) / batch_size
        run.widths.append(width)
        run.tokens.append(now.yields(width, matching))
        run.milliseconds.append(machine.milliseconds(batch_size, width))
        ideal.append(now.best(machine, policy.widths, batch_size, matching) * run.milliseconds[-1])
        seen, matches = matches, now.next(matches, random)
    return run, ideal
