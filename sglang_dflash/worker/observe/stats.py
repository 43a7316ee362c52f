"""Counters of the decode steps for ``/server_info``, and the time that the worker's stages take."""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import record_function

if TYPE_CHECKING:
    from sglang_dflash.worker.observe.observer import StepRecord


class Clock:
    """Nothing waits for a moment: on an accelerator it is an event on its stream, known once the device reached it.

    Attributes:
        now: -> the present moment.
    """

    now: Callable[[], Any]

    def __init__(self, device: torch.device | str) -> None:
        device = torch.device(device)
        self._events: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self.now = time.perf_counter if self._events is None else self._event

    def _event(self) -> Any:
        event = self._events.Event(enable_timing=True)
        event.record()
        return event

    def has_passed(self, moment: Any) -> bool:
        return self._events is None or bool(moment.query())

    def seconds(self, start: Any, end: Any) -> float:
        """Between two moments that have passed."""
        return float(end - start if self._events is None else start.elapsed_time(end) / 1000)


STAGE_TIMES = "SGLANG_DFLASH_STAGE_TIMES"


@dataclass
class StepStats:
    """Counters of one worker since it started.

    Attributes:
        widths: steps by block width.
        accept_lens: verified blocks by accept length (accepted drafts plus the bonus token).
        match_lens: copied blocks by the length of their match.
        copied_tokens: tokens that copies brought and the drafts in their place would not have.
    """

    widths: Counter[int] = field(default_factory=Counter)
    accept_lens: Counter[int] = field(default_factory=Counter)
    match_lens: Counter[int] = field(default_factory=Counter)
    copied_tokens: int = 0

    def count(self, record: StepRecord) -> None:
        """Count a finished step."""
        self.widths[record.width] += 1
        self.accept_lens.update(record.accept_lens)
        if record.copied is not None:
            self.match_lens.update(record.copied.lengths)
            self.copied_tokens += record.copied.tokens

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
            "copied_blocks_by_match_length": {str(length): n for length, n in sorted(self.match_lens.items())},
            "tokens_brought_by_copies": self.copied_tokens,
        }


class Stages:
    """Ranges ``dflash.<stage>`` while a profiler records, and the stages' times if ``SGLANG_DFLASH_STAGE_TIMES=1``.

    Args:
        device: that runs the steps. An accelerator's times lie between events on its stream; nothing waits for it.
        timed: whether times are measured.
    """

    def __init__(self, device: torch.device | str, timed: bool) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._measured: deque[tuple[str, Any, Any]] = deque()
        self._timed, self._clock = timed, Clock(device)

    @contextlib.contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Mark the part of a step that is ``stage``."""
        with record_function(f"dflash.{stage}"):
            if not self._timed:
                yield
                return
            start = self._clock.now()
            yield
            self._measured.append((stage, start, self._clock.now()))

    def collect(self) -> dict[str, float]:
        """Seconds by stage since the server started, of the stages that the device has finished."""
        while self._measured and self._clock.has_passed(self._measured[0][2]):
            stage, start, end = self._measured.popleft()
            self._seconds[stage] += self._clock.seconds(start, end)
        return dict(self._seconds)
