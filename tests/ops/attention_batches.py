"""A block's attention of any batch against its definition; run as ``attention_cases.py`` is, where hypothesis is."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.attention_cases import BOUND, DEVICE, Case, Tiling, error_of


@given(
    case=st.builds(
        Case,
        lengths=st.lists(st.integers(0, 300), min_size=1, max_size=3).map(tuple),
        width=st.integers(1, 17),
        group=st.sampled_from((1, 2, 3, 4, 8)),
        kv_heads=st.integers(1, 2),
        page=st.sampled_from((1, 16, 64)),
        pads=st.integers(0, 2),
        ring=st.integers(0, 9),
        parts=st.integers(1, 20),
        tiles=st.builds(
            Tiling, st.sampled_from((16, 32)), st.sampled_from((16, 32)), st.just(4), st.just(2), st.integers(1, 2)
        ),
        sinks=st.booleans(),
        options=st.fixed_dictionaries(
            {"causal": st.booleans(), "window": st.integers(-1, 200), "cap": st.sampled_from((0.0, 3.0))}
        ),
    ),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=8 if DEVICE == "cpu" else 5)
def test_block_attention_of_any_batch(case: Case, seed: int) -> None:
    assert error_of(case, seed) <= BOUND[case.dtype]
