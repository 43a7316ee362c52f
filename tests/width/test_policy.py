"""The fixed and random policies, and what holds for every policy."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from sglang_dflash.width import AdaptiveWidth, CostTable, RandomWidth, WidthPolicy
from tests.width.traffic import WIDTHS, Machine


def policies() -> list[WidthPolicy]:
    return [
        WidthPolicy(16),
        RandomWidth(*WIDTHS, seed=3),
        AdaptiveWidth(CostTable(Machine(3).points())),
        AdaptiveWidth(CostTable(Machine(3).points(widths=(1, 16)))),
    ]


def answers(policy: WidthPolicy, seed: int) -> list[tuple[int, str]]:
    """The policy's choices for random batches, with late and missing observations."""
    random, found, late = Random(seed), [], []
    for _ in range(120):
        size, context = random.randint(1, 40), random.randint(0, 10_000)
        width = policy.width(size, context)
        found.append((width, str(policy.paused)))
        late.append((width, [random.randint(1, width) for _ in range(size)]))
        if len(late) > random.randint(0, 2):
            policy.observe(*late.pop(0))
        if random.random() < 0.7:
            policy.observe_time(size, width, random.uniform(0.01, 1000))
    return found


@given(st.integers(0, 10_000), st.integers(0, 3))
def test_ranks_that_receive_the_same_calls_choose_the_same_widths(seed, which):
    policy, other = policies()[which], policies()[which]
    found = answers(policy, seed)
    assert found == answers(other, seed)
    assert {width for width, _ in found} <= set(policy.widths)
