"""Times of steps in flight, and the ranges of a profile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang_dflash.step import flight
from sglang_dflash.step.flight import Finished, Flight, PickedWidth, Timed
from sglang_dflash.worker import worker

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


def launch(flight: Flight, width: int) -> None:
    flight.begin()
    step: Any = SimpleNamespace(batch=SimpleNamespace(reqs=()), caught_up=width == 2)
    flight.launched(PickedWidth(width, 2, ()), step, [width])


def test_a_step_lasts_until_the_next_one_starts_and_is_read_when_the_device_has_finished(events: Events) -> None:
    flight = Flight("meta")
    launch(flight, 1), launch(flight, 2)
    assert flight.finish([1, 1]) == (Finished(1, (), (), [1, 1], []), [1])
    events.done = 2
    flight.interrupt()  # by a prefill
    finished, kept = flight.finish([2, 1])
    assert (finished.width, kept, finished.timed) == (2, [2], [Timed(2, 1, 1.0, caught_up=False, tokens=2)])
    events.done = 3
    launch(flight, 2), launch(flight, 4)
    events.done = 4
    assert flight.finish([2, 2])[0].timed == [Timed(2, 2, 1.0, caught_up=True, tokens=4)]


def test_one_step_of_several_is_timed(events: Events) -> None:
    flight, events.done = Flight("meta", every=3), 100
    for width in range(1, 8):
        launch(flight, width)
    timed = [each.width for width in range(1, 8) for each in flight.finish([width])[0].timed]
    assert timed == [1, 4] and events.recorded == 5


def test_stages_are_ranges_of_a_profile_and_cost_nothing_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.profiler.profile() as profile, worker.stage("doubling"):
        torch.ones(2).mul_(2)
    assert [event.name for event in profile.events() if event.name.startswith("dflash.")] == ["dflash.doubling"]
    monkeypatch.setattr(worker, "record_function", None)
    with worker.stage("draft"):
        pass
