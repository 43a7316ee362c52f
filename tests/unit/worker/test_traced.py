"""A stage shows in a trace, and costs nothing without one."""

from __future__ import annotations

from unittest import mock

import torch

from sglang_dflash.worker.observe import traced as module
from sglang_dflash.worker.observe.traced import traced


@traced("dflash.doubling")
def double(x: torch.Tensor) -> torch.Tensor:
    """Twice ``x``."""
    return x * 2


def test_a_profiler_sees_the_range() -> None:
    with torch.profiler.profile() as profile:
        assert double(torch.ones(2)).tolist() == [2.0, 2.0]
    assert [event.name for event in profile.events() if event.name.startswith("dflash.")] == ["dflash.doubling"]


def test_nothing_is_recorded_without_one() -> None:
    with mock.patch.object(module, "record_function") as recorder:
        assert double(torch.ones(1)).item() == 2.0
    assert not recorder.called
    assert double.__doc__ == "Twice ``x``."
