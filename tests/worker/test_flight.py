"""Times of steps in flight, and the ranges of a profile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang_dflash.worker import debug, flight
from sglang_dflash.worker.flight import StepRecord, StepTimer

pytestmark = pytest.mark.sglang


class Events:
    """A device's events, one millisecond apart; the device has finished the first ``done``."""

    def __init__(self) -> None:
        self.done, self.recorded = 0, 0

    def Event(self, enable_timing: bool) -> Any:
        assert enable_timing
        event = SimpleNamespace(query=lambda: event.at <= self.done, elapsed_time=lambda end: float(end.at - event.at))
        event.record = lambda: self._record(event)
        return event

    def _record(self, event: Any) -> None:
        self.recorded += 1
        event.at = self.recorded


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Events:
    events = Events()
    monkeypatch.setattr(flight.torch, "get_device_module", lambda device: events)
    return events


def started(timer: StepTimer) -> StepRecord:
    record = StepRecord(16, 2)
    timer.started(record)
    return record


def test_a_step_lasts_until_the_next_one_starts_and_is_read_when_the_device_has_finished(events: Events) -> None:
    timer = StepTimer("meta")
    first, second = started(timer), started(timer)
    assert timer.finished() == []
    events.done = 2
    assert timer.finished() == [first] and first.milliseconds == 1
    timer.interrupted()  # by a prefill
    events.done = 3
    third, _ = started(timer), started(timer)
    events.done = 4
    assert timer.finished() == [third]
    assert second.milliseconds is None


def test_one_step_of_several_is_timed(events: Events) -> None:
    timer, events.done = StepTimer("meta", every=3), 100
    records = [started(timer) for _ in range(7)]
    assert timer.finished() == [records[0], records[3]] and events.recorded == 5


def test_stages_are_ranges_of_a_profile_and_cost_nothing_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.profiler.profile() as profile, debug.stage("doubling"):
        torch.ones(2).mul_(2)
    assert [event.name for event in profile.events() if event.name.startswith("dflash.")] == ["dflash.doubling"]
    monkeypatch.setattr(debug, "record_function", None)
    with debug.stage("draft"):
        pass
