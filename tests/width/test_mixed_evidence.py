"""Greedy and sampled requests share the survival fit: what that costs, against a fit for each.

Their drafts survive differently. The accept lengths are those of docs/results/sampled.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random
from types import SimpleNamespace

import pytest

from sglang_dflash.width import AdaptiveWidth, CostTable
from sglang_dflash.width.survival import SurvivalByMatch
from tests.width.traffic import Machine, accept_lens, yields

STEPS, SEEDS = 800, 3
USERS_AND_RATIOS = [(1, 1.5), (1, 3.0), (1, 8.0), (8, 3.0)]
# Tokens per step of 16, greedy and sampled.
MEASURED = {"tiny-forks, T 1.0": (5.64, 5.03), "tiny-forks, T 0.7": (5.64, 6.29), "tiny-dense, T 0.7": (11.27, 9.19)}


class FitOfEach:
    """A survival fit of greedy and one of sampled requests; ``batch`` has a 1 for each sampled one."""

    def __init__(self, policy: AdaptiveWidth) -> None:
        self.fits = [SurvivalByMatch(policy.widths, policy.widths[-1]) for _ in range(2)]
        self.matched, self.batch = self.fits[0].matched, [0, 1]

    @property
    def unmatched(self) -> SimpleNamespace:
        return SimpleNamespace(may_have_improved=any(self.fits[k].unmatched.may_have_improved for k in set(self.batch)))

    def tokens(self, path: int, matches: Sequence[int] = ()) -> list[float]:
        each = [fit.tokens(path) for fit in self.fits]
        return [sum(column[k] for k in self.batch) / len(self.batch) for column in zip(*each, strict=True)]

    def observe(self, width: int, accept_lens: Sequence[int], kinds: Sequence[int]) -> None:
        for kind, fit in enumerate(self.fits):
            fit.observe(width, [n for n, k in zip(accept_lens, kinds, strict=True) if k == kind], [])


class Apart(AdaptiveWidth):
    def forget(self) -> None:
        self.paused, self.by_match = None, FitOfEach(self)

    def width(self, batch_size: int, context: int = 0, matches: Sequence[int] = ()) -> int:
        self.survival = self.by_match.unmatched
        return super().width(batch_size, context, matches)

    def _count_pauses(self, matching: bool) -> None:
        """Reports only."""


def alternating(size: int, seed: int) -> Iterator[list[int]]:
    for step in range(STEPS):
        yield [step // 100 % 2] * size


def mixed(size: int, seed: int) -> Iterator[list[int]]:
    random, kinds = Random(seed), [0] * size
    for _ in range(STEPS):
        kinds = [random.randrange(2) if random.random() < 0.05 else kind for kind in kinds]  # of 20 steps each
        yield kinds


def speed(policy: AdaptiveWidth, machine: Machine, hazards: Sequence[float], batches: Iterator[list[int]]) -> float:
    """Expected tokens per millisecond; the policy observes a step after the next one has started."""
    acceptance, times, late, tokens, milliseconds = Random(0), Random(1), None, 0.0, 0.0
    for kinds in batches:
        if isinstance(policy, Apart):
            policy.by_match.batch = kinds
        width = policy.width(len(kinds))
        if late is not None:
            policy.observe(*late)
        lens = [accept_lens(lambda _, k=kind: hazards[k], width, 1, acceptance)[0] for kind in kinds]
        late = width, lens, kinds if isinstance(policy, Apart) else []
        policy.observe_time(len(kinds), width, machine.measured(len(kinds), width, times))
        tokens += sum(yields(hazards[kind], width) for kind in kinds)
        milliseconds += machine.milliseconds(len(kinds), width)
    return tokens / milliseconds


def hazard_of(tokens: float) -> float:
    return next(n / 1000 for n in range(1000) if yields(n / 1000, 16) >= tokens)


def cost(machine: Machine, hazards: Sequence[float], size: int, traffic: Callable[[int, int], Iterator]) -> float:
    """Return the share of speed that the shared fit loses."""
    shared, apart = (
        sum(speed(kind(CostTable(machine.points())), machine, hazards, traffic(size, seed)) for seed in range(SEEDS))
        for kind in (AdaptiveWidth, Apart)
    )
    return 1 - shared / apart


@pytest.mark.parametrize(("size", "ratio"), USERS_AND_RATIOS)
@pytest.mark.parametrize("measured", MEASURED)
def test_one_fit_of_greedy_and_sampled_requests_costs_less_than_3_percent(
    measured: str, size: int, ratio: float
) -> None:
    hazards = [hazard_of(tokens) for tokens in MEASURED[measured]]
    costs = {traffic.__name__: cost(Machine(ratio), hazards, size, traffic) for traffic in (alternating, mixed)}
    print(measured, size, ratio, *(f"{name} {value:.1%}" for name, value in costs.items()))
    assert max(costs.values()) < 0.03, costs


def test_fits_of_kinds_that_differ_much_would_pay() -> None:
    found = cost(Machine(3.0), (0.9, 0.6), 1, mixed)
    print(f"{found:.1%}")
    assert found > 0.03
