"""Steps in flight: what the worker keeps of a launched step until its counts and its time are known."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sglang_dflash.upstream import Req


@dataclass
class StepRecord:
    """One decode step.

    Attributes:
        width: positions of the block, anchor included.
        context: committed tokens, summed over the batch, as last seen by the host.
        requests: until the step is counted.
        matched: per request, whether it had a match at the launch; empty without copied blocks.
        found: with copied blocks, int64 [R, 2] of ``ops.reference.step.match_copies``, on the host when the counts are.
        rows: of the requests in ``found``.
        caught_up: the step also injected the tokens of plain steps, so its time is an upper bound.
        accept_lens: per request, accepted drafts plus the bonus token; empty until the host has them.
        match_lens: lengths of the matches that were copied.
        copied_tokens: accepted tokens at positions where the drafts were replaced by copies.
        milliseconds: to the next step's start; None until then, and after another forward.
    """

    width: int
    batch_size: int
    context: int
    requests: tuple[Req, ...] = ()
    matched: Sequence[bool] = ()
    found: Tensor | None = None
    rows: Sequence[int] = ()
    caught_up: bool = False
    accept_lens: Sequence[int] = ()
    match_lens: Sequence[int] = ()
    copied_tokens: int = 0
    milliseconds: float | None = None


class Clock:
    """Non-blocking timestamps: events on the current stream of an accelerator, or ``perf_counter`` on a CPU."""

    now: Callable[[], Any]

    def __init__(self, device: torch.device | str) -> None:
        device = torch.device(device)
        self._events: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self.now = time.perf_counter if self._events is None else self._event

    def _event(self) -> Any:
        event = self._events.Event(enable_timing=True)
        event.record()
        return event

    def has_passed(self, timestamp: Any) -> bool:
        return self._events is None or bool(timestamp.query())

    def seconds(self, start: Any, end: Any) -> float:
        return float(end - start if self._events is None else start.elapsed_time(end) / 1000)


class StepTimer:
    """Times one decode step of ``every``, without waiting.

    A step's time ends at the start of the next decode step, so it includes the scheduler's work between the two.
    """

    def __init__(self, device: torch.device | str, every: int = 1) -> None:
        self._clock, self._every, self._launched = Clock(device), every, 0
        self._untimed: deque[tuple[StepRecord, Any, Any]] = deque()
        self._last: tuple[StepRecord, Any] | None = None

    def started(self, record: StepRecord) -> None:
        """Note the start of a step, on its stream, before its launch."""
        timed = self._launched % self._every == 0
        self._launched += 1
        now = self._clock.now() if timed or self._last is not None else None
        if self._last is not None:
            self._untimed.append((*self._last, now))
        self._last = (record, now) if timed else None

    def interrupted(self) -> None:
        """Note that another forward is about to be launched."""
        self._last = None

    def finished(self) -> list[StepRecord]:
        """Return the steps whose time has become available."""
        done = []
        while self._untimed and self._clock.has_passed(self._untimed[0][2]):
            record, start, end = self._untimed.popleft()
            record.milliseconds = self._clock.seconds(start, end) * 1000
            done.append(record)
        return done
