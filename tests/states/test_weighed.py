"""How long a ring of records is, and where states are replayed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sglang_dflash.check.flags import parse
from sglang_dflash.memory.fit import Demand
from sglang_dflash.memory.machine import UNKNOWN_GPU
from sglang_dflash.memory.sizes import StateBytes
from sglang_dflash.states.choice import is_replayed, ring_length, weigh

DEMAND = Demand(
    target_weights=1000,
    drafter_weights=200,
    target_kv=8,
    draft_kv=2,
    state=StateBytes(recurrent=90, conv=10, conv_column=5, record=2),
    block=4,
    slots_per_request=5,
    state_share=1.0,
    max_running=8,
)
STATIC = 1200 + 10_000


@pytest.mark.parametrize(("block", "length"), [(1, 16), (2, 16), (15, 16), (16, 16), (17, 32), (32, 32), (33, 64)])
def test_a_ring_holds_the_block_in_a_power_of_two_from_sixteen(block: int, length: int) -> None:
    assert ring_length(block) == length


def test_both_ways_are_weighed() -> None:
    weighed = weigh(DEMAND, STATIC)
    assert (weighed.scratch_kept, weighed.scratch_replayed) == (4 * 90 + 25, 16 * 2 + 25)
    assert (weighed.running_kept, weighed.running_replayed) == (5, 8)
    assert str(replace(weighed, scratch_replayed=41 << 20)).startswith(
        "41.0 MiB of scratch a request replayed, 0.4 KiB"
    )


def test_states_are_replayed_where_that_lets_more_requests_run() -> None:
    def worth_it(demand: Demand) -> bool:
        return is_replayed(parse([], target="t", drafter="d")[0], UNKNOWN_GPU, None, weigh(demand, STATIC))

    assert worth_it(DEMAND)
    assert not worth_it(replace(DEMAND, max_running=5))  # all run either way
    assert not worth_it(replace(DEMAND, max_states=10))  # two run either way
