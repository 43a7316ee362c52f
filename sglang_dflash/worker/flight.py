"""Steps in flight: what the worker keeps of a launched step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sglang_dflash.upstream.worker import async_d2h

if TYPE_CHECKING:
    from sglang_dflash.upstream.worker import Req


@dataclass
class StepRecord:
    """One decode step.

    Attributes:
        width: positions of the block, anchor included.
        buckets: per request, the bucket of its match at the launch.
        found: int64 [R, 2] of ``ops.reference.step.match_copies``, from :func:`on_host`; ``rows``: the requests' in it.
        not_finite: in some steps, the drafter's count of non-finite positions, int64 [], from :func:`on_host`.
        caught_up: whether the step also injected tokens of plain steps, so that its time is an upper bound.
        accept_lens: per request, accepted drafts plus the bonus token; empty until the host has them.
        match_lens, copied_tokens: lengths of the copied matches; accepted tokens at copied positions.
        milliseconds: until the next step's start; None until then, and after another forward.
    """

    width: int
    batch_size: int
    requests: tuple[Req, ...] = ()
    buckets: Sequence[int] = ()
    found: Tensor | None = None
    rows: Sequence[int] = ()
    not_finite: Tensor | None = None
    caught_up: bool = False
    accept_lens: Sequence[int] = ()
    match_lens: Sequence[int] = ()
    copied_tokens: int = 0
    milliseconds: float | None = None


class StepTimer:
    """Times one of ``every`` decode steps without blocking."""

    def __init__(self, device: torch.device | str, every: int = 1) -> None:
        device = torch.device(device)
        self._events: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._every, self._launched = every, 0
        self._untimed: deque[tuple[StepRecord, Any, Any]] = deque()
        self._last: tuple[StepRecord, Any] | None = None

    def started(self, record: StepRecord) -> None:
        timed = self._launched % self._every == 0
        self._launched += 1
        now = self._now() if timed or self._last is not None else None
        if self._last is not None:
            self._untimed.append((*self._last, now))
        self._last = (record, now) if timed else None

    def interrupted(self) -> None:
        """Call before another forward is launched."""
        self._last = None

    def finished(self) -> list[StepRecord]:
        done = []
        while self._untimed and (self._events is None or self._untimed[0][2].query()):
            record, start, end = self._untimed.popleft()
            record.milliseconds = (end - start) * 1000 if self._events is None else start.elapsed_time(end)
            done.append(record)
        return done

    def _now(self) -> Any:
        if self._events is None:
            return time.perf_counter()
        event = self._events.Event(enable_timing=True)
        event.record()
        return event


def on_host(tensor: Tensor) -> Tensor:
    """Return a copy that is on the host no later than the counts of the step being launched."""
    return tensor.clone() if tensor.is_cpu else async_d2h(tensor)
