"""The worker's counters, its fixed width, its banner."""

from __future__ import annotations

from sglang_dflash.drafter.config import DrafterConfig
from sglang_dflash.width import FixedWidth, WidthPolicy
from sglang_dflash.worker.observe.info import banner, identity
from sglang_dflash.worker.observe.stats import StepStats
from tests.support.configs import drafter


def test_steps_are_counted_in_launch_order_with_their_own_width() -> None:
    stats = StepStats()
    stats.started(16)
    stats.started(4)  # overlap: the next step is launched before the first one's result is there
    assert stats.finished([3, 16]) == 16
    assert stats.finished([1, 4]) == 4
    assert stats.as_dict() == {
        "steps_by_width": {"4": 1, "16": 1},
        "blocks_by_accept_length": {"1": 1, "3": 1, "4": 1, "16": 1},
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
