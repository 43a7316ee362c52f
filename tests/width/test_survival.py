"""Survival from censored counts: against the formula, against the truth, and when traffic changes."""

from __future__ import annotations

from math import inf
from random import Random
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_dflash.width import Survival
from sglang_dflash.width.survival import MEMORY
from tests.width.traffic import accept_lens

without_start = patch("sglang_dflash.width.survival.START_TRIES", 0.0)

blocks = st.integers(1, 8).flatmap(
    lambda width: st.tuples(st.just(width), st.lists(st.integers(1, width), min_size=1, max_size=6))
)


@given(st.lists(blocks, max_size=30))
def test_the_curve_is_a_survival_function_and_tokens_are_its_sum(observed):
    survival = Survival(8)
    for width, lens in observed:
        survival.observe(width, lens)
        curve = survival.curve()
        assert all(0 <= hazard <= 1 for hazard in survival.hazards)
        assert all(0 <= later <= earlier <= 1 for earlier, later in zip([1.0, *curve], curve, strict=False))
        tokens = [survival.tokens[width] for width in range(1, 9)]
        assert tokens == pytest.approx([1 + sum(curve[: width - 1]) for width in range(1, 9)])


@without_start
def test_one_step_may_suggest_better_drafts_and_the_next_one_may_refute_it():
    survival = Survival(8)
    for _ in range(50):
        survival.observe(2, [1, 1, 1, 1])
        assert not survival.may_have_improved
    survival.observe(2, [2, 2, 1, 1])
    assert survival.may_have_improved and survival.changes == 0
    survival.observe(2, [1, 1, 1, 1])
    assert not survival.may_have_improved


def test_steady_traffic_rarely_counts_as_a_change_and_counts_do_not_overflow():
    survival, random = Survival(16), Random(0)
    for _ in range(4000):
        survival.observe(16, accept_lens(lambda j: 0.8, 16, 8, random))
    assert survival.changes <= 40  # with some 80 tries in each step
    assert survival.hazards[1] == pytest.approx(0.8, abs=0.1)
    assert survival.evidence()[0] == pytest.approx(8 * MEMORY, rel=0.7)


@pytest.mark.parametrize("start", range(1331, 1337))
def test_a_rescale_of_the_counts_during_a_test_for_a_change_does_not_affect_the_hazards(start):
    scaled, unscaled, random = Survival(8), Survival(8), Random(start)
    for step in range(start + 12):
        lens = accept_lens(lambda j, h=0.8 if step < start else 0.3: h, 8, 1, random)
        scaled.observe(8, lens)
        with patch("sglang_dflash.width.survival._RESCALE", inf):
            unscaled.observe(8, lens)
        assert scaled.hazards == pytest.approx(unscaled.hazards)
    assert scaled._units[1] < 1e9 < unscaled._units[1]


def test_evidence_that_only_ages_leaves_the_hazards_finite():
    """A server may serve millions of steps without a match."""
    survival = Survival(8)
    with patch("sglang_dflash.width.survival.MEMORY", 1.0), patch("sglang_dflash.width.survival.PLAIN_MEMORY", 1.0):
        for _ in range(2000):
            survival.observe(8, ())
    survival.observe(8, [8])
    assert all(0 < hazard <= 1 for hazard in survival.hazards)
