"""A share of the memory with which every request that was asked for finds its states, and K/V."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sglang_dflash.plan.pools import TOKENS_PER_REQUEST, RequestState, Sizing, best_ratio, fit

SIZING = Sizing(
    target_weights=0,
    drafter_weights=0,
    target_kv=1,
    draft_kv=0,
    kept=RequestState(2000),
    replayed=RequestState(2000),
    block=4,
    slots_per_request=5,
    context=2048,
    state_share=0.9,
    max_running=8,
)


def test_the_lowest_ratio_with_which_all_run() -> None:
    """Eight requests hold 40 states, and the pool has one more: 82,000 of 123,000 bytes are two parts to one."""
    static = 123_000
    assert fit(SIZING, static, replay=True).running < 8
    assert best_ratio(SIZING, static, replay=True) == 2.0
    assert fit(replace(SIZING, state_share=2.0), static, replay=True).running == 8


def test_a_ratio_that_is_enough_stays() -> None:
    assert best_ratio(SIZING, 1_000_000, replay=True) == 0.9


def test_running_requests_keep_their_kv() -> None:
    """With states for eight, some 9,000 tokens would be left."""
    static = 95_000
    ratio = best_ratio(SIZING, static, replay=True)
    fitted = fit(replace(SIZING, state_share=ratio), static, replay=True)
    assert fit(replace(SIZING, state_share=9.9), static, replay=True).running == 8
    assert fitted.running == 7 and fitted.tokens >= 7 * SIZING.context


def test_a_raised_ratio_leaves_kv_for_a_whole_context() -> None:
    """With states for all eight 41,000 tokens would be left."""
    static, long = 123_000, replace(SIZING, context=50_000)
    ratio = best_ratio(long, static, replay=True)
    fitted = fit(replace(long, state_share=ratio), static, replay=True)
    assert 0.9 < ratio < 2.0 and fitted.tokens >= 50_000
    assert fitted.tokens >= fitted.running * TOKENS_PER_REQUEST
    own = fit(SIZING, static, replay=True)
    assert best_ratio(replace(SIZING, context=own.tokens + 1), static, replay=True) == 0.9


@pytest.mark.parametrize("fixed", [{"max_states": 10}, {"replayed": RequestState()}])
def test_a_ratio_that_decides_nothing_stays(fixed: dict[str, object]) -> None:
    assert best_ratio(replace(SIZING, **fixed), 123_000, replay=True) == 0.9  # type: ignore[arg-type]
