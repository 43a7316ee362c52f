"""The policies that learn nothing, and what every policy keeps to."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_dflash.width import AdaptiveWidth, CostTable, FixedWidth, RandomWidth, WidthPolicy
from tests.width.traffic import WIDTHS, Machine


def test_the_fixed_width_never_changes():
    policy: WidthPolicy = FixedWidth(8)
    assert policy.widths == (8,) and policy.cut(4) == 0 and policy.paused is None
    assert [policy.width(size) for size in (1, 64)] == [8, 8]


def test_random_widths_are_equally_likely_and_repeat_with_their_seed():
    first, second, other = RandomWidth([4, 1, 2, 4], 1), RandomWidth([1, 2, 4], 1), RandomWidth([1, 2, 4], 2)
    drawn = [first.width(8) for _ in range(3000)]
    assert first.widths == (1, 2, 4) and first.max_width == 4
    assert drawn == [second.width(1) for _ in range(3000)] != [other.width(1) for _ in range(3000)]
    assert all(count == pytest.approx(1000, rel=0.1) for count in Counter(drawn).values())


def test_random_cuts_leave_the_widths_as_they_are():
    whole, ragged = RandomWidth(WIDTHS, 1), RandomWidth(WIDTHS, 1, ragged=True)
    thresholds = [ragged.cut(8) for _ in range(100)]
    assert whole.cut(8) == 0 and len(set(thresholds)) == 100
    assert [whole.width(8) for _ in range(100)] == [ragged.width(8) for _ in range(100)]


def policies() -> list[WidthPolicy]:
    points = Machine(3).points()
    return [
        FixedWidth(16),
        RandomWidth(WIDTHS, 3, ragged=True),
        AdaptiveWidth(WIDTHS),
        AdaptiveWidth(WIDTHS, CostTable.calibrated(points)),
        AdaptiveWidth((1, 16), CostTable.calibrated(points, (1, 16)), ragged=False),
    ]


def told(policy: WidthPolicy, seed: int) -> list[object]:
    """What the policy answers to random batches, with late and missing news of any kind."""
    random, answers, news = Random(seed), [], []
    for _ in range(120):
        size, context = random.randint(1, 40), random.randint(0, 10_000)
        width = policy.width(size, context)
        answers += [width, policy.cut(size), str(policy.paused)]
        verify = [random.randint(1, width) for _ in range(size)] if random.random() < 0.5 else None
        news.append((width, [random.randint(1, most) for most in verify or [width] * size], verify))
        if len(news) > random.randint(0, 2):
            policy.observe(*news.pop(0))
        if random.random() < 0.7:
            policy.observe_time(size, width, context, random.uniform(0.01, 1000))
    return answers


@given(st.integers(0, 10_000), st.integers(0, 4))
def test_ranks_that_are_told_the_same_answer_the_same_and_within_bounds(seed, which):
    policy, other = policies()[which], policies()[which]
    answers = told(policy, seed)
    assert answers == told(other, seed)
    assert set(answers[0::3]) <= set(policy.widths) and policy.widths[-1] == policy.max_width
    assert all(0 <= cut < 1 for cut in answers[1::3])
