"""Telemetry: counts and times are matched with their steps, and stages are timed on demand."""

from __future__ import annotations

import pytest
import torch

from sglang_dflash.width import FixedWidth
from sglang_dflash.worker.observe import observer as observer_module
from sglang_dflash.worker.observe.metrics import StepRecord
from sglang_dflash.worker.observe.observer import STAGE_TIMES, Observer, Stages, Steps


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(observer_module, "time", clock)
    return clock


def started(flight: Steps, clock: Clock, at: float, width: int) -> StepRecord:
    clock.now, record = at, StepRecord(width, 2, 100)
    flight.started(record)
    return record


def test_a_step_lasts_until_the_next_one_starts(clock: Clock) -> None:
    flight = Steps("cpu")
    first = started(flight, clock, 1.0, 16)
    assert flight.timed() == []
    started(flight, clock, 1.02, 4)
    assert flight.timed() == [first]
    assert first.milliseconds == pytest.approx(20)


def test_a_step_before_a_prefill_has_no_time(clock: Clock) -> None:
    flight = Steps("cpu")
    first = started(flight, clock, 0.0, 16)
    clock.now = 0.01
    flight.interrupted()
    second = started(flight, clock, 0.5, 4)
    assert flight.timed() == []
    third = started(flight, clock, 0.53, 4)
    assert flight.timed() == [second]
    assert first.milliseconds is None and third.milliseconds is None


def observer(monkeypatch: pytest.MonkeyPatch) -> Observer:
    monkeypatch.setattr(observer_module, "step_metrics", lambda _: None)
    return Observer("cpu", 16, torch.zeros((), dtype=torch.int64))


def test_stages_are_profiler_ranges_and_cost_nothing_without_a_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STAGE_TIMES, raising=False)
    watched = observer(monkeypatch)
    with torch.profiler.profile() as profile, watched.stages()("doubling"):
        torch.ones(2).mul_(2)
    assert [event.name for event in profile.events() if event.name.startswith("dflash.")] == ["dflash.doubling"]
    monkeypatch.setattr(observer_module, "record_function", None)
    with watched.stages()("draft"):
        pass
    assert watched.info(FixedWidth(16))["stage_seconds"] == {}


class FakeEvents:
    """A device's events, one millisecond apart; the device has finished the first ``done``."""

    def __init__(self) -> None:
        self.done, self.recorded = 0, 0

    def Event(self, enable_timing: bool) -> FakeEvents._Event:
        assert enable_timing
        return self._Event(self)

    class _Event:
        def __init__(self, device: FakeEvents) -> None:
            self.device, self.at = device, 0

        def record(self) -> None:
            self.device.recorded += 1
            self.at = self.device.recorded

        def query(self) -> bool:
            return self.at <= self.device.done

        def elapsed_time(self, end: FakeEvents._Event) -> float:
            return float(end.at - self.at)


def test_a_devices_times_are_read_after_it_has_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    events = FakeEvents()
    monkeypatch.setattr(observer_module.torch, "get_device_module", lambda device: events)
    stages = Stages("meta", timed=True)
    for stage in ("draft", "verify"):
        with stages(stage):
            pass
    assert stages.collect() == {}
    events.done = 2
    assert stages.collect() == {"draft": pytest.approx(0.001)}
    events.done = 4
    assert stages.collect() == {"draft": pytest.approx(0.001), "verify": pytest.approx(0.001)}
