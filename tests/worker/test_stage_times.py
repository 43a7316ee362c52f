"""One instrument for a step's stages: ranges for a profiler, times for ``/server_info``, nothing otherwise."""

from __future__ import annotations

import time
from unittest import mock

import pytest
import torch

from sglang_dflash.worker.observe import stats as module
from sglang_dflash.worker.observe.stats import STAGE_TIMES, Stages


def test_a_profiler_sees_the_range() -> None:
    stages = Stages("cpu")
    with torch.profiler.profile() as profile, stages("doubling"):
        torch.ones(2).mul_(2)
    assert [event.name for event in profile.events() if event.name.startswith("dflash.")] == ["dflash.doubling"]


def test_nothing_is_recorded_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STAGE_TIMES, raising=False)
    stages = Stages("cpu")
    with mock.patch.object(module, "record_function") as recorder, stages("draft"):
        pass
    assert not recorder.called
    assert stages.collect() == {}


def test_times_on_request_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STAGE_TIMES, "1")
    stages = Stages("cpu")
    for _ in range(2):
        for stage in ("draft", "verify"):
            with stages(stage):
                time.sleep(0.002)
    once = stages.collect()
    assert set(once) == {"draft", "verify"}
    assert min(once.values()) >= 0.004
    assert stages.collect() == once  # a time is counted once


class FakeEvents:
    """A device's events: each is a millisecond after the last, and done when the test says so."""

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


def test_a_devices_times_come_once_it_has_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STAGE_TIMES, "1")
    events = FakeEvents()
    monkeypatch.setattr(module.torch, "get_device_module", lambda device: events)
    stages = Stages("meta")
    for stage in ("draft", "verify"):
        with stages(stage):
            pass
    assert stages.collect() == {}
    events.done = 2
    assert stages.collect() == {"draft": pytest.approx(0.001)}
    events.done = 4
    assert stages.collect() == {"draft": pytest.approx(0.001), "verify": pytest.approx(0.001)}
