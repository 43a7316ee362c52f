"""A share of the memory with which every request that was asked for finds its states, and K/V."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sglang_dflash.memory.fit import MIN_TOKENS, Demand, fit, share
from sglang_dflash.memory.sizes import StateBytes

DEMAND = Demand(
    target_weights=0,
    drafter_weights=0,
    target_kv=1,
    draft_kv=0,
    state=StateBytes(recurrent=2000, conv=0, conv_column=0, record=0),
    block=4,
    slots_per_request=5,
    state_share=0.9,
    max_running=8,
)


def test_the_lowest_ratio_with_which_all_run() -> None:
    """Eight requests hold 40 states, and the pool has one more: 82,000 of 123,000 bytes are two parts to one."""
    static = 123_000
    assert fit(DEMAND, static, replay=True).running < 8
    assert share(DEMAND, static, replay=True) == 2.0
    assert fit(replace(DEMAND, state_share=2.0), static, replay=True).running == 8


def test_a_ratio_that_is_enough_stays() -> None:
    assert share(DEMAND, 1_000_000, replay=True) == 0.9


def test_running_requests_keep_their_kv() -> None:
    """With states for eight, some 9,000 tokens would be left."""
    static = 95_000
    ratio = share(DEMAND, static, replay=True)
    fitted = fit(replace(DEMAND, state_share=ratio), static, replay=True)
    assert fit(replace(DEMAND, state_share=9.9), static, replay=True).running == 8
    assert fitted.running == 7 and fitted.tokens >= 7 * MIN_TOKENS


@pytest.mark.parametrize("fixed", [{"max_states": 10}, {"state": StateBytes(0, 0, 0)}])
def test_a_ratio_that_decides_nothing_stays(fixed: dict[str, object]) -> None:
    assert share(replace(DEMAND, **fixed), 123_000, replay=True) == 0.9  # type: ignore[arg-type]
