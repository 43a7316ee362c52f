"""Which steps snapshot recurrent states for the prefix cache."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("sglang")

from sglang_dflash.states.commit import may_cross

pytestmark = pytest.mark.sglang


@given(
    lengths=st.lists(st.integers(1, 2000), min_size=1, max_size=4),
    gained=st.data(),
    growth=st.integers(1, 64),
    interval=st.sampled_from([1, 16, 64, 256]),
)
def test_no_crossing_is_missed(lengths: list[int], gained: st.DataObject, growth: int, interval: int) -> None:
    """Wherever in the growth a step begins and ends."""
    for length in lengths:
        before = length + gained.draw(st.integers(0, growth))
        after = gained.draw(st.integers(before, length + growth))
        if before // interval != after // interval:
            assert may_cross(lengths, growth, interval)
