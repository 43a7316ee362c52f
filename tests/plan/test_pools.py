"""Sizes per unit and the division of memory, by hand for small shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_dflash.check.pools import RequestState, Sizing, fit
from sglang_dflash.check.sizes import StateBytes, draft_kv_per_token, target_kv_per_token
from sglang_dflash.drafter.config import DrafterConfig
from sglang_dflash.plan.serving import DraftWindow, context_window
from tests.support.configs import drafter

FULL, SLIDING = "full_attention", "sliding_attention"
HYBRID = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + [FULL],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_value_head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
STATE = StateBytes(recurrent=90, conv=10, conv_column=5, record=2)
DENSE = Sizing(
    target_weights=1000,
    drafter_weights=200,
    target_kv=8,
    draft_kv=2,
    kept=RequestState(),
    replayed=RequestState(),
    block=4,
    slots_per_request=5,
    context=50,
    state_share=1.0,
    max_running=3,
)
RECURRENT = replace(
    DENSE,
    kept=RequestState(STATE.slot, STATE.snapshots(4)),
    replayed=RequestState(STATE.slot, STATE.records(4, 8), 8 * STATE.record),
)
STATIC = 1200 + 10_000


def test_kv_counts_the_targets_attention_layers_and_all_layers_of_the_drafter() -> None:
    sizes = [target_kv_per_token(HYBRID, kv_bytes=2, tp_size=tp) for tp in (1, 2, 4)]
    assert sizes == [1 * 2 * heads * 8 * 2 for heads in (2, 1, 1)]  # ranks beyond the KV heads hold copies
    assert draft_kv_per_token(DrafterConfig.from_dict(drafter()), kv_bytes=2, tp_size=1) == 2 * 2 * 2 * 16 * 2


def test_kept_states_take_their_share_and_limit_the_requests() -> None:
    fitted = fit(RECURRENT, STATIC)
    # 5,000 bytes: (5,000 - 100 * 5) / (100 * (1 + 4 / 5)) = 25 slots, five per request
    assert (fitted.state_slots, fitted.running) == (25, 3)
    assert fitted.bytes["states"] == 26 * 100
    assert fitted.bytes["scratch"] == 4 * STATE.snapshots(4)
    assert fitted.tokens == (10_000 - 100 * (4 * 4 + 26)) // 10
    assert fit(replace(RECURRENT, max_running=100), STATIC).running == 5
    assert fit(replace(RECURRENT, max_states=10), STATIC).running == 2
    weights_only = fit(RECURRENT, 1000)
    assert (weights_only.tokens, weights_only.running) == (0, 0)


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
def test_the_context_that_a_drafter_reads(layers: list[str], requested: int | None, expected: int | None) -> None:
    config = DrafterConfig.from_dict(drafter(layer_types=layers, sliding_window=128))
    assert context_window(requested, config) == expected


@given(
    window=st.integers(1, 300),
    block=st.integers(1, 32),
    page=st.sampled_from([1, 16, 64]),
    context=st.integers(1, 1000),
    length=st.integers(0, 1000),
)
def test_a_ring_holds_every_slot_that_one_step_may_touch(
    window: int, block: int, page: int, context: int, length: int
) -> None:
    slots = DraftWindow(window, block, page).ring_slots(context)
    length = min(length, context + block)  # the last block may run past the end
    oldest = max(0, length - window) // page * page
    assert slots % page == 0
    assert slots >= length + block - oldest
    assert slots < min(window, context + block) + block + 2 * page
