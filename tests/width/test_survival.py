"""Survival from censored counts: against the formula, against the truth, and when traffic changes."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_dflash.width.survival import Survival

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


def test_evidence_that_only_ages_leaves_the_hazards_finite():
    """A server may serve millions of steps without a match."""
    survival = Survival(8)
    with patch("sglang_dflash.width.survival.MEMORY", 1.0), patch("sglang_dflash.width.survival.PLAIN_MEMORY", 1.0):
        for _ in range(2000):
            survival.observe(8, ())
    survival.observe(8, [8])
    assert all(0 < hazard <= 1 for hazard in survival.hazards)
