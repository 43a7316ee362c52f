"""What the host learns of a decode step, piece by piece: its launch, its duration, its accept lengths."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sglang_dflash.worker.observe.step_log import StepLog


class Clock:
    """Moments on the device that runs the steps. Nothing waits for them.

    On an accelerator a moment is an event on its stream, known once the device has reached it.
    """

    def __init__(self, device: torch.device | str) -> None:
        device = torch.device(device)
        self._events = None if device.type == "cpu" else torch.get_device_module(device)

    def now(self) -> Any:
        if self._events is None:
            return time.perf_counter()
        event = self._events.Event(enable_timing=True)
        event.record()
        return event

    def has_passed(self, moment: Any) -> bool:
        return self._events is None or bool(moment.query())

    def seconds(self, start: Any, end: Any) -> float:
        """Between two moments that have passed."""
        return float(end - start if self._events is None else start.elapsed_time(end) / 1000)


@dataclass
class StepRecord:
    """One decode step.

    Attributes:
        width: positions of the block, anchor included.
        rids: the batch's requests.
        context: committed tokens of all of them, as far as the host knew.
        at: seconds since the server's first step.
        milliseconds: from the step's start to the next one's; None if something else ran between, or not known yet.
        accept_lens: accepted drafts plus bonus token of each request; empty before the host knows.
        caught_up: whether it injected what plain steps had left waiting, which is not part of its width's time.
    """

    width: int
    rids: list[str]
    context: int
    at: float = 0.0
    milliseconds: float | None = None
    accept_lens: Sequence[int] = ()
    caught_up: bool = False
    timed: bool = field(default=False, repr=False)  # whether ``milliseconds`` is final

    @property
    def batch_size(self) -> int:
        return len(self.rids)


class Steps:
    """The steps in flight; each is handed out when its counts are known, and again when its time is.

    A step's time runs from its start to the start of the next decode step, so it includes what the scheduler adds
    between two steps.

    Args:
        device: that runs the steps.
        log: where steps are written; None for nowhere.
    """

    def __init__(self, device: torch.device | str, log: StepLog | None = None) -> None:
        self._clock, self._log = Clock(device), log
        self._began = time.perf_counter()
        self._uncounted: deque[StepRecord] = deque()
        self._untimed: deque[tuple[StepRecord, Any, Any]] = deque()
        self._last: tuple[StepRecord, Any] | None = None

    def started(self, record: StepRecord) -> None:
        """A decode step is about to be launched."""
        now = self._clock.now()
        if self._last is not None:
            self._untimed.append((*self._last, now))
        self._last = record, now
        record.at = time.perf_counter() - self._began
        self._uncounted.append(record)
        if self._log is not None:
            self._log.expect(record)

    def interrupted(self, prefilled: Sequence[str] = (), tokens: int = 0) -> None:
        """Something other than a decode step is about to be launched: a prefill of these requests' ``tokens``."""
        if self._last is not None:
            self._last[0].timed = True
            self._last = None
        if self._log is not None and prefilled:
            self._log.prefill(time.perf_counter() - self._began, prefilled, tokens)

    def counted(self, accept_lens: Sequence[int]) -> StepRecord:
        """The oldest step without counts has these; steps come in launch order."""
        record = self._uncounted.popleft()
        record.accept_lens = accept_lens
        return record

    def timed(self) -> list[StepRecord]:
        """Steps whose time has become known."""
        done = []
        while self._untimed and self._clock.has_passed(self._untimed[0][2]):
            record, start, end = self._untimed.popleft()
            record.milliseconds = self._clock.seconds(start, end) * 1000
            record.timed = True
            done.append(record)
        if self._log is not None:
            self._log.write()
        return done
