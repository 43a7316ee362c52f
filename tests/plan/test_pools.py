"""Sizes per unit and the division of memory, by hand for small shapes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_dflash.check.pools import RequestState, Sizing, fit
from sglang_dflash.check.sizes import StateBytes, draft_kv_per_token, target_kv_per_token
from sglang_dflash.drafter.config import DrafterConfig
from sglang_dflash.plan.division import TOKENS_PER_REQUEST
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


def test_a_dense_target_gives_the_rest_to_kv() -> None:
    fitted = fit(DENSE, 2200)
    assert (fitted.tokens, fitted.running, fitted.bytes["states"], fitted.bytes["scratch"]) == (100, 3, 0, 0)
    assert (fitted.bytes["target_kv"], fitted.bytes["draft_kv"]) == (101 * 8, 101 * 2)  # one padding token
    assert fit(replace(DENSE, max_tokens=40), 2200).tokens == 40
    paged = fit(replace(DENSE, page=16), 2200)
    assert (paged.tokens, paged.bytes["target_kv"]) == (96, 112 * 8)  # whole pages, and one of padding


def test_rings_replace_the_drafters_slot_per_token() -> None:
    fitted = fit(replace(DENSE, ring=7), 2200)
    assert fitted.tokens == (1000 - 3 * 7 * 2) // 8
    assert fitted.bytes["draft_kv"] == (3 * 7 + 1) * 2  # one padding token


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


def test_replayed_states_take_the_block_out_of_the_division() -> None:
    fitted = fit(RECURRENT, STATIC, replay=True)
    # windows of 10 + 3 * 5 bytes and records of 8 * 2 for three requests and a padding row
    windows, records = 4 * 25, 4 * 16
    # half of 9,900 bytes: (4,950 - 64 - 100) / 100 slots
    assert (fitted.state_slots, fitted.running) == (47, 3)
    assert (fitted.bytes["states"], fitted.bytes["scratch"]) == (48 * 100, windows + records)
    assert fitted.tokens == (10_000 - windows - records - 48 * 100) // 10


def test_a_replay_reserves_scratch_for_every_requested_request_and_has_its_own_state() -> None:
    """Of 100 requests 6 find states: 101 rows of scratch are reserved, 7 allocated."""
    fitted = fit(replace(RECURRENT, max_running=100), STATIC, replay=True)
    slots = int((10_000 - 101 * 25) / 2 - 101 * 16 - 100) // 100
    assert (fitted.state_slots, fitted.running) == (slots, slots // 5)
    assert fitted.bytes["scratch"] == (slots // 5 + 1) * (25 + 16)
    assert fitted.tokens == (10_000 - 101 * (25 + 16) - (slots + 1) * 100) // 10
    wide = replace(RECURRENT, replayed=replace(RECURRENT.replayed, slot=200), max_states=10)
    assert [fit(wide, STATIC, replay=replay).bytes["states"] for replay in (True, False)] == [11 * 200, 11 * 100]


WIDE = RequestState(STATE.slot, STATE.snapshots(8))
LONG = RequestState(STATE.slot, STATE.records(4, 400), 400 * STATE.record)


@pytest.mark.parametrize(
    ("changes", "replay", "cap"),
    [
        ({"max_running": 2}, False, "--max-running-requests"),
        ({"max_running": 80, "block": 8, "kept": WIDE}, False, "verify scratch"),
        ({"max_running": 80}, False, "recurrent states"),
        ({"max_running": 20}, True, "recurrent states"),
        ({"max_running": 80, "replayed": LONG}, True, "verify scratch"),
        ({"max_tokens": 2}, True, "tokens of K/V"),
        ({"max_tokens": 2, "kept": RequestState()}, False, "tokens of K/V"),
    ],
)
def test_the_limit_of_running_requests(changes: dict[str, Any], replay: bool, cap: str) -> None:
    assert fit(replace(RECURRENT, **changes), STATIC, replay=replay).capped_by == cap


SPLIT = replace(
    DENSE,
    target_weights=0,
    drafter_weights=0,
    target_kv=1,
    draft_kv=0,
    kept=RequestState(2000),
    replayed=RequestState(2000),
    context=2048,
    state_share=0.9,
    max_running=8,
)


def test_all_requests_get_states_where_they_fit_and_sglangs_division_is_the_least() -> None:
    """Eight requests hold 40 states."""
    own = int((123_000 * 0.9 / 1.9 - 2000) // 2000)
    assert (own // 5, fit(SPLIT, 123_000, replay=True).state_slots) == (5, 40)
    assert fit(SPLIT, 1_000_000, replay=True).state_slots == int((1_000_000 * 0.9 / 1.9 - 2000) // 2000) > 40
    assert fit(replace(SPLIT, state_share=0.8), 123_000, replay=True).state_slots == int(
        (123_000 / 2.25 - 2000) // 2000
    )


def test_kv_are_left_for_running_requests_and_for_one_context() -> None:
    # With states for eight, 13,000 tokens would be left.
    fitted = fit(SPLIT, 95_000, replay=True)
    assert fitted.running == 7 and fitted.tokens >= 7 * SPLIT.context
    # With states for seven, 51,000 tokens would be left: for a context of 50,000, not for seven long answers.
    for context in (50_000, 60_000):
        fitted = fit(replace(SPLIT, context=context), 123_000, replay=True)
        assert fitted.running == 6 and fitted.tokens >= max(context, 6 * TOKENS_PER_REQUEST)
    own = fit(replace(SPLIT, context=200_000), 123_000, replay=True)
    assert own.state_slots == int((123_000 * 0.9 / 1.9 - 2000) // 2000)  # a context does not fit either way


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
