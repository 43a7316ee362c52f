"""Steps in flight: data of launched steps until their accept counts are on the host, and step times."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_dflash.step.step import Step


class PickedWidth(NamedTuple):
    """A step's width, the number of requests for which it was picked, and the buckets of the batch's requests."""

    width: int
    batch_size: int
    buckets: Sequence[int]


@dataclass
class Timed:
    """The time of a step, from its start to that of the next one.

    Attributes:
        caught_up: whether the step also injected tokens of plain steps, so that the time is an upper bound.
        tokens: those that the step committed, of all requests.
    """

    batch_size: int = 0
    width: int = 0
    milliseconds: float = 0.0
    caught_up: bool = False
    tokens: int = 0
    start: Any = field(default=None, compare=False)
    end: Any = field(default=None, compare=False)


@dataclass(frozen=True)
class Finished:
    """A decode step whose accept counts are on the host.

    Attributes:
        width: positions of the block, anchor included.
        requests: those of the batch.
        buckets: per request, the bucket of its match at the launch; empty if no text is copied.
        accept_lens: per request, accepted drafts plus the bonus token.
        timed: the steps whose times reached the host since the last finished step.
    """

    width: int
    requests: Sequence[Req]
    buckets: Sequence[int]
    accept_lens: Sequence[int]
    timed: Sequence[Timed] = ()


class Flight:
    """The queue of launched steps. One of ``every`` steps is timed, without blocking."""

    def __init__(self, device: torch.device | str, every: int = 1) -> None:
        device = torch.device(device)
        self._events: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._every, self._begun = every, 0
        self._steps: deque[tuple[PickedWidth, Sequence[Req], Timed | None, Sequence[Any]]] = deque()
        self._open: Timed | None = None
        self._ended: deque[Timed] = deque()

    def begin(self) -> None:
        """Call before a decode step is launched."""
        timed = self._begun % self._every == 0
        self._begun += 1
        now = self._now() if timed or self._open is not None else None
        if self._open is not None:
            self._open.end = now
            self._ended.append(self._open)
        self._open = Timed(start=now) if timed else None

    def interrupt(self) -> None:
        """Call before another forward is launched."""
        self._open = None

    def launched(self, picked: PickedWidth, step: Step, collected: Sequence[Any]) -> None:
        """Queue a launched step. ``collected`` is returned with the finished step."""
        if (span := self._open) is not None:
            span.batch_size, span.width, span.caught_up = picked.batch_size, picked.width, step.caught_up
        self._steps.append((picked, tuple(step.batch.reqs), span, collected))

    def finish(self, accept_lens: Sequence[int]) -> tuple[Finished, Sequence[Any]]:
        """Return the oldest step and the data that its features collected."""
        picked, requests, span, collected = self._steps.popleft()
        if span is not None:
            span.tokens = sum(accept_lens)
        return Finished(picked.width, requests, picked.buckets, accept_lens, self.times()), collected

    def times(self) -> list[Timed]:
        timed = []
        while self._ended and (self._events is None or self._ended[0].end.query()):
            span = self._ended.popleft()
            seconds = span.end - span.start if self._events is None else span.start.elapsed_time(span.end) / 1000
            span.milliseconds = seconds * 1000
            timed.append(span)
        return timed

    def _now(self) -> Any:
        if self._events is None:
            return time.perf_counter()
        event = self._events.Event(enable_timing=True)
        event.record()
        return event
