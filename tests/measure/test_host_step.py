"""What the counter of host time counts."""

from __future__ import annotations

import itertools

import pytest

from sglang_dflash_lab.measure import host_step


def test_excluded_functions_stop_the_watch_wherever_they_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reading of the clock is a nanosecond later than the last: a stretch of the step costs one."""
    monkeypatch.setattr(host_step.time, "perf_counter_ns", itertools.count().__next__)
    watch = host_step.Stopwatch()
    kernel = watch.excluded(lambda: watch.excluded(lambda: None)())

    def step(kernels: int) -> None:
        for _ in range(kernels):
            kernel()

    watch.counted(step)(0)
    assert (watch.read(), watch.read()) == (1, 0)
    watch.counted(step)(2)
    step(5)  # outside a step
    assert watch.read() == 3
    with pytest.raises(ZeroDivisionError):
        watch.counted(lambda: watch.excluded(lambda: 1 / 0)())()
    assert not watch.running and watch.read() == 2
