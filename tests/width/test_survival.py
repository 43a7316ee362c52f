"""Survival from censored counts: against the formula, against the truth, and when traffic changes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_dflash.width.survival import MEMORY, Survival

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


def test_old_evidence_fades():
    """What was observed long ago weighs no more than the newest tries."""
    survival = Survival(8)
    for _ in range(400):
        survival.observe(8, [8] * 4)
    assert survival.hazards[1] > 0.95
    for _ in range(400):
        survival.observe(8, [1] * 4)
    assert survival.hazards[1] < 0.05 and survival.as_dict()["evidence"][0] < MEMORY + 4
