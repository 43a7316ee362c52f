"""The worker's counters, its fixed width, its banner."""

from __future__ import annotations

from sglang_dflash.drafter.config import DrafterConfig
from sglang_dflash.width import FixedWidth, WidthPolicy
from sglang_dflash.worker.observe.info import banner, identity
from sglang_dflash.worker.observe.stats import StepStats
from sglang_dflash.worker.observe.steps import StepRecord
from tests.support.configs import drafter


def test_steps_are_counted_with_their_own_width() -> None:
    stats = StepStats()
    stats.count(StepRecord(16, ["a", "b"], 0, accept_lens=[3, 16]))
    stats.count(StepRecord(4, ["a", "b"], 0, accept_lens=[1, 4], verify_lens=[2, 4]))
    assert stats.as_dict() == {
        "steps_by_width": {"4": 1, "16": 1},
        "blocks_by_accept_length": {"1": 1, "3": 1, "4": 1, "16": 1},
        "block_positions": {"laid_out": 40, "verified": 38},
        "mean_accept_length": 6.0,
    }


def test_no_accept_length_before_the_first_block() -> None:
    assert StepStats().mean_accept_length is None


def test_fixed_width_ignores_what_it_sees() -> None:
    policy: WidthPolicy = FixedWidth(8)
    policy.observe(8, [1, 1])
    assert [policy.width(batch_size) for batch_size in (1, 64)] == [8, 8]


def test_the_banner_names_the_pair_and_how_it_is_served() -> None:
    config = DrafterConfig.from_dict(drafter())
    for window, said in ((None, "window none"), (64, "window 64")):
        found = identity(
            config,
            target="t",
            drafter="d",
            max_width=8,
            adaptive=False,
            window=window,
            draft_attention_backend="triton",
        )
        line = banner(found)
        for part in ("target t", "drafter d", "block 8", "full_attention/full_attention", said, "width 8"):
            assert part in line
