"""Tensor-parallel ranks choose the same widths although they measure different times."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dflash.errors import DFlashError
from sglang_dflash.width import AdaptiveWidth, CostTable, FixedWidth
from sglang_dflash.worker.observe.metrics import StepRecord
from sglang_dflash.worker.widths import SharedTimes, StepTimes

WIDTHS = (1, 2, 4, 8, 16)
POINTS = {(size, width): 10.0 + size * width for size in (1, 8) for width in WIDTHS}


class Ranks:
    """Two ranks in lockstep: what an event loop does, with rank 0's list handed to both."""

    def __init__(self) -> None:
        self.policies = [AdaptiveWidth(CostTable(POINTS)) for _ in range(2)]
        self.times = [SharedTimes(policy, 2) for policy in self.policies]

    def turn(self, requests: list[Any]) -> list[list[Any]]:
        """The top of the event loop: both ranks receive."""
        sent: list[Any] = []

        def broadcast(mine: list[Any] | None) -> list[Any]:
            if mine is not None:
                sent[:] = mine
            return list(sent)

        return [self.times[0].broadcast(broadcast, requests), self.times[1].broadcast(broadcast, None)]


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_ranks_that_measure_differently_choose_the_same(seed: int) -> None:
    random, ranks = Random(seed), Ranks()
    chosen: list[tuple[int, int]] = []
    in_flight: list[tuple[int, int]] = []
    for _ in range(200):
        requests = ["request"] * random.randrange(2)
        assert ranks.turn(requests) == [requests, requests]
        batch_size = random.choice((1, 2, 8, 32))
        widths = [policy.width(batch_size, 100 * batch_size) for policy in ranks.policies]
        chosen.append((widths[0], widths[1]))
        in_flight.append((batch_size, widths[0]))
        if len(in_flight) > 1:  # results come one step late
            size, width = in_flight.pop(0)
            accepted = [random.randint(1, width) for _ in range(size)]
            for rank in range(2):
                ranks.policies[rank].observe(width, accepted)
                if random.random() < 0.7:  # a rank may know a time before the other does, or never
                    record = StepRecord(width, size, 100 * size, milliseconds=random.uniform(1, 50) * (rank + 1))
                    ranks.times[rank].add([record])
    assert all(first == second for first, second in chosen)
    assert len({first for first, _ in chosen}) > 1
    assert ranks.policies[0].costs.measured == ranks.policies[1].costs.measured > 0


def test_ranks_whose_policies_diverge_stop() -> None:
    """Before they choose different widths and deadlock."""
    ranks = Ranks()
    for rank, accepted in enumerate((4, 3)):
        ranks.policies[rank].observe(4, [accepted])
    ranks.times[0].add([StepRecord(4, 1, 100, milliseconds=5.0)])
    with pytest.raises(DFlashError, match="ranks committed different tokens"):
        ranks.turn([])


def test_times_are_sent_only_when_there_are_any() -> None:
    sent: list[Any] = []
    times = SharedTimes(FixedWidth(4), 2)
    assert times.broadcast(lambda requests: sent.append(requests) or requests, ["a"]) == ["a"]  # type: ignore[func-returns-value, return-value]
    times.add([StepRecord(4, 1, 7, milliseconds=2.0)])
    assert times.broadcast(lambda requests: sent.append(requests) or requests, ["b"]) == ["b"]  # type: ignore[func-returns-value, return-value]
    assert times.broadcast(lambda requests: sent.append(requests) or requests, ["c"]) == ["c"]  # type: ignore[func-returns-value, return-value]
    assert sent == [["a"], ["b", StepTimes(((1, 4, 7, 2.0, False),), 0)], ["c"]]
