"""What the steps brought: counts that the host has anyway, one step late, and stage times on request."""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

STAGE_TIMES = "SGLANG_DFLASH_STAGE_TIMES"


@dataclass
class StepStats:
    """Counters of one worker since it started.

    Attributes:
        widths: steps by block width.
        accept_lens: verified blocks by accept length (accepted drafts plus the bonus token).
        stage_seconds: time by stage; empty unless ``SGLANG_DFLASH_STAGE_TIMES=1``.
    """

    widths: Counter[int] = field(default_factory=Counter)
    accept_lens: Counter[int] = field(default_factory=Counter)
    stage_seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    _running: deque[int] = field(default_factory=deque)

    def started(self, width: int) -> None:
        """Note a step that was launched; its result comes back later, in launch order."""
        self._running.append(width)

    def finished(self, accept_lens: Sequence[int]) -> int:
        """Count the oldest running step's result and return its width."""
        width = self._running.popleft()
        self.widths[width] += 1
        self.accept_lens.update(accept_lens)
        return width

    @property
    def mean_accept_length(self) -> float | None:
        """New tokens per verified block; None before the first."""
        blocks = sum(self.accept_lens.values())
        return sum(n * count for n, count in self.accept_lens.items()) / blocks if blocks else None

    def as_dict(self) -> dict[str, Any]:
        """For ``/server_info``: JSON has string keys only."""
        return {
            "steps_by_width": {str(width): n for width, n in sorted(self.widths.items())},
            "blocks_by_accept_length": {str(length): n for length, n in sorted(self.accept_lens.items())},
            "mean_accept_length": self.mean_accept_length,
            "stage_seconds": dict(self.stage_seconds),
        }


class StageClock(Protocol):
    """Measures the stages of a step."""

    def mark(self, stage: str | None) -> None:
        """End ``stage``; None begins a step."""

    def collect(self, seconds: defaultdict[str, float]) -> None:
        """Add the finished steps' times, in seconds by stage."""


class NoClock:
    """Measures nothing."""

    def mark(self, stage: str | None) -> None:
        pass

    def collect(self, seconds: defaultdict[str, float]) -> None:
        pass


class HostClock:
    """Wall time; right where the host does the work itself."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._last = 0.0

    def mark(self, stage: str | None) -> None:
        now = time.perf_counter()
        if stage is not None:
            self._seconds[stage] += now - self._last
        self._last = now

    def collect(self, seconds: defaultdict[str, float]) -> None:
        for stage, spent in self._seconds.items():
            seconds[stage] += spent
        self._seconds.clear()


class EventClock:
    """Device time between events on the stream that runs the step; never waits for the device."""

    def __init__(self, device: torch.device | str) -> None:
        self._module = torch.get_device_module(device)
        self._steps: deque[list[tuple[str, Any]]] = deque()

    def mark(self, stage: str | None) -> None:
        event = self._module.Event(enable_timing=True)
        event.record()
        if stage is None:
            self._steps.append([])
        self._steps[-1].append((stage or "", event))

    def collect(self, seconds: defaultdict[str, float]) -> None:
        while self._steps and self._steps[0][-1][1].query():
            marks = self._steps.popleft()
            for (_, start), (stage, end) in zip(marks, marks[1:], strict=False):
                seconds[stage] += start.elapsed_time(end) / 1000


def stage_clock(device: torch.device | str) -> StageClock:
    """The clock for ``device`` if ``SGLANG_DFLASH_STAGE_TIMES=1``, else one that costs nothing."""
    if os.environ.get(STAGE_TIMES) != "1":
        return NoClock()
    return HostClock() if torch.device(device).type == "cpu" else EventClock(device)
