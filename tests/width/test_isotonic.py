"""Isotonic regression: monotone, mean-preserving, and weighted by certainty."""

from __future__ import annotations

from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_dflash.width.cost import isotonic

pairs = st.lists(st.tuples(st.floats(0.1, 1000), st.floats(0.01, 100)), min_size=1, max_size=12)


@given(pairs)
def test_the_result_never_falls_keeps_the_weighted_mean_and_leaves_monotone_input_alone(pairs):
    values, variances = [value for value, _ in pairs], [variance for _, variance in pairs]
    found = isotonic(values, variances)
    assert all(left <= right + 1e-9 for left, right in zip(found, found[1:], strict=False))
    weights = [1 / variance for variance in variances]
    assert fmean(found, weights) == pytest.approx(fmean(values, weights))
    assert isotonic(sorted(values), variances) == sorted(values)
