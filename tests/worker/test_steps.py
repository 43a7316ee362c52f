"""Steps in flight: counts and times find their step, and the log has them in launch order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_dflash.worker.observe import clock as clock_module
from sglang_dflash.worker.observe import steps
from sglang_dflash.worker.observe.steps import STEP_LOG, StepRecord, Steps


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (steps, clock_module):
        monkeypatch.setattr(module, "time", clock)
    return clock


def started(flight: Steps, clock: Clock, at: float, width: int) -> StepRecord:
    clock.now, record = at, StepRecord(width, ["a", "b"], 100)
    flight.started(record)
    return record


def test_counts_come_in_launch_order_with_overlap(clock: Clock) -> None:
    flight = Steps("cpu", log=False)
    first, second = started(flight, clock, 0.0, 16), started(flight, clock, 0.01, 4)
    assert flight.counted([3, 16]) is first
    assert flight.counted([1, 4]) is second
    assert second.accept_lens == [1, 4]


def test_a_step_lasts_until_the_next_one_starts(clock: Clock) -> None:
    flight = Steps("cpu", log=False)
    first = started(flight, clock, 1.0, 16)
    assert flight.timed() == []
    started(flight, clock, 1.02, 4)
    assert flight.timed() == [first]
    assert first.milliseconds == pytest.approx(20)


def test_a_step_before_a_prefill_has_no_time(clock: Clock) -> None:
    flight = Steps("cpu", log=False)
    first = started(flight, clock, 0.0, 16)
    clock.now = 0.01
    flight.interrupted(["c"], 50)
    second = started(flight, clock, 0.5, 4)
    assert flight.timed() == []
    third = started(flight, clock, 0.53, 4)
    assert flight.timed() == [second]
    assert (first.timed, first.milliseconds, third.timed) == (True, None, False)


def test_the_log_has_whole_steps_in_launch_order(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STEP_LOG, str(tmp_path / "steps.jsonl"))
    flight = Steps("cpu", log=True)
    flight.interrupted(["a", "b"], 64)
    first = started(flight, clock, 0.25, 8)
    started(flight, clock, 0.5, 1)
    first.verify_lens = [3, 8]
    flight.counted([2, 8])
    flight.timed()
    flight.counted([1, 1])
    flight.timed()  # its time is not known, so it waits
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert lines == [
        {"at": 0.0, "kind": "prefill", "rids": ["a", "b"], "tokens": 64, "ms": None},
        {
            "at": 0.25,
            "kind": "decode",
            "rids": ["a", "b"],
            "width": 8,
            "verify": [3, 8],
            "accept": [2, 8],
            "context": 100,
            "ms": 250.0,
        },
    ]


def test_other_ranks_write_no_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STEP_LOG, str(tmp_path / "steps.jsonl"))
    Steps("cpu", log=False).interrupted(["a"], 1)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_ends_the_log_and_no_step(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(STEP_LOG, "/dev/full")
    flight = Steps("cpu", log=True)
    for at in range(4):
        started(flight, clock, at, 2)
        flight.counted([1, 2])
        flight.timed()
    assert len(caplog.records) == 1
    assert f"{STEP_LOG} ends here" in caplog.text and "No space left" in caplog.text
