"""How far back the drafter reads, and the slots that it takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_dflash.drafter.config import DrafterConfig
from sglang_dflash.plan.serving import DraftWindow, context_window
from tests.support.configs import drafter

FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("layers", "requested", "expected"),
    [
        ([FULL, FULL], None, None),
        ([FULL, FULL], 16, 16),
        ([SLIDING, FULL], None, None),
        ([SLIDING, FULL], 64, 127),  # the sliding layer keeps its own window, and all layers share the ring
        ([SLIDING, FULL], 4096, 4096),
        ([SLIDING, SLIDING], 64, 127),
        ([SLIDING, SLIDING], 4096, 127),
    ],
)
def test_context_window(layers: list[str], requested: int | None, expected: int | None) -> None:
    config = DrafterConfig.from_dict(drafter(layer_types=layers, sliding_window=128))
    assert context_window(requested, config) == expected


@given(
    window=st.integers(1, 300),
    block=st.integers(1, 32),
    page=st.sampled_from([1, 16, 64]),
    context=st.integers(1, 1000),
    length=st.integers(0, 1000),
)
def test_a_ring_holds_whatever_one_step_may_touch(
    window: int, block: int, page: int, context: int, length: int
) -> None:
    slots = DraftWindow(window, block, page).ring_slots(context)
    length = min(length, context + block)  # the last block may run past the end
    oldest = max(0, length - window) // page * page
    assert slots % page == 0
    assert slots >= length + block - oldest
    assert slots < min(window, context + block) + block + 2 * page
