"""DP attention: simulated ranks, whose policies receive the same calls and so choose the same widths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("sglang")

from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_dflash.errors import DFlashError
from sglang_dflash.features.ranks import SharedWidth
from sglang_dflash.step.flight import Finished, Timed
from sglang_dflash.width import AdaptiveWidth, CostTable, WidthPolicy
from sglang_dflash.width.policy import BUCKETS
from tests.plugin.dflash_test_plugin.policies import RandomWidth
from tests.width.traffic import WIDTHS, Machine

pytestmark = pytest.mark.sglang

WIDEST = WIDTHS[-1]


class Rank:
    """A rank of ``random`` requests and results; a request is its bucket of match length."""

    def __init__(self, policy: WidthPolicy, seed: int) -> None:
        self.policy, self.random = policy, Random(seed)
        self.width = SharedWidth(WidthPolicy(WIDEST), lambda reqs: [int(req) for req in reqs])  # type: ignore[arg-type]
        self.width.policy = policy
        self.batch: Any = None
        self.launched: list[Finished] = []
        self.told: list[Finished] = []

    def take_requests(self) -> None:
        requests = [self.random.choice((0, 0, *range(BUCKETS))) for _ in range(self.random.choice((0, 0, 1, 2, 7)))]
        self.batch = batch(requests) if requests else None

    def launch(self, load: Any) -> int:
        width = self.policy.width(*load)
        if self.batch is not None:
            lens = [self.random.randint(1, width) for _ in self.batch.reqs]
            times = Timed(load.batch_size, width, self.random.uniform(1, 30))  # another one on every rank
            timed = [times] if self.random.random() < 0.8 else []
            self.launched.append(Finished(width, (), self.batch.reqs, lens, timed))
        return width

    def process_results(self) -> None:
        """One step late, sometimes two, and then both at once."""
        while len(self.launched) > self.random.randint(0, 2):
            self.told.append(self.launched.pop(0))
            self.width.read(self.told[-1], None)


def batch(requests: list[int]) -> Any:
    return SimpleNamespace(forward_mode=ForwardMode.DECODE, batch_size=lambda: len(requests), reqs=requests)


def gather(group: Sequence[Rank], *, decodes: bool) -> None:
    for rank in group:
        rank.width.batch = rank.batch if decodes else None
    rows = torch.stack([rank.width.gather() for rank in group])
    for rank in group:
        rank.width.gathered(rows)


def turn(group: Sequence[Rank]) -> list[int] | None:
    """One turn of the schedulers; the widths if it decodes."""
    for rank in group:
        rank.take_requests()
    gather(group, decodes=False)  # for prefills
    prefills = group[0].random.random() < 0.2
    widths = None
    if not prefills and any(rank.batch for rank in group):
        gather(group, decodes=True)
        if group[0].random.random() < 0.2:  # without overlap, results are processed before the launch
            for rank in group:
                rank.process_results()
        widths = [rank.launch(rank.width.load) for rank in group]
    for rank in group:
        rank.process_results()
    return widths


POLICIES: dict[str, Callable[[], WidthPolicy]] = {
    "adaptive": lambda: AdaptiveWidth(CostTable(Machine(2).points()), 8),
    "random": lambda: RandomWidth(*WIDTHS, seed=3),
    "fixed": lambda: WidthPolicy(WIDEST),
}


@settings(max_examples=25)
@given(st.sampled_from(sorted(POLICIES)), st.integers(2, 8), st.integers(0, 10_000))
def test_ranks_choose_the_same_widths_and_learn_every_step_once(name: str, number: int, seed: int) -> None:
    group = [Rank(POLICIES[name](), seed + index) for index in range(number)]
    learn, learned = group[0].policy.observe, list[tuple[int, int, int]]()

    def observe(width: int, accept_lens: Sequence[int], buckets: Sequence[int]) -> None:
        learned.extend((width, *each) for each in zip(accept_lens, buckets, strict=True))
        learn(width, accept_lens, buckets)

    group[0].policy.observe = observe  # type: ignore[assignment, method-assign]
    found = [widths for _ in range(60) if (widths := turn(group))]
    assert found and all(len(set(widths)) == 1 for widths in found)
    for _ in range(max(len(rank.width._finished) for rank in group) + 1):
        gather(group, decodes=False)
    assert len({str(rank.policy.describe()) for rank in group}) == 1
    told = [record for rank in group for record in rank.told]
    counts = ((record, *each) for record in told for each in zip(record.accept_lens, record.buckets, strict=True))
    assert sorted(learned) == sorted((record.width, length, bucket) for record, length, bucket in counts)


def test_a_width_is_for_the_largest_batch_and_the_matches_of_all_requests() -> None:
    group = [Rank(WidthPolicy(WIDEST), 0) for _ in range(3)]
    group[0].batch, group[2].batch = batch([0, 2, 2]), batch([0, 4])
    gather(group, decodes=True)
    assert {(rank.width.load.batch_size, *rank.width.load.matches) for rank in group} == {(3, 2, 0, 2, 0, 1)}


FAULTS: dict[str, Callable[[WidthPolicy], Any]] = {
    "an idle rank chose no width": lambda policy: None,
    "a rank learned something else": lambda policy: policy.observe(8, [1, 1]),
    "a rank measured another time": lambda policy: policy.observe_time(1, 8, 5.0),
}


@pytest.mark.parametrize(("name", "fault"), [*(("adaptive", fault) for fault in FAULTS), ("random", [*FAULTS][0])])
def test_policies_that_differ_are_one_error_on_every_rank_before_the_next_step(name: str, fault: str) -> None:
    group = [Rank(POLICIES[name](), seed) for seed in range(3)]
    gather(group, decodes=False)
    for rank in group[1:]:
        rank.policy.width(2)
    FAULTS[fault](group[0].policy)
    if fault != "an idle rank chose no width":
        group[0].policy.width(2)
    rows = torch.stack([rank.width.gather() for rank in group])
    for rank in group:
        with pytest.raises(DFlashError, match="width policies of 3 ranks differ"):
            rank.width.gathered(rows)
