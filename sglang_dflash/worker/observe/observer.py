"""Telemetry facade of the worker: matches counts and times with their steps, and feeds counters, metrics and log."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from sglang_dflash.causes import FIXES, NOT_FINITE
from sglang_dflash.width import WidthPolicy
from sglang_dflash.worker.observe.drafting import Payoff
from sglang_dflash.worker.observe.metrics import StepRecord, StepStats, step_metrics

logger = logging.getLogger(__name__)

STAGE_TIMES = "SGLANG_DFLASH_STAGE_TIMES"
EVERY = 32  # steps between two reads of the drafter's count of non-finite drafts, and between two timed steps


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


class Stages:
    """Profiler ranges ``dflash.<stage>``, and the stages' times with ``SGLANG_DFLASH_STAGE_TIMES=1``."""

    def __init__(self, device: torch.device | str, timed: bool) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._measured: deque[tuple[str, Any, Any]] = deque()
        self._timed, self._clock = timed, Clock(device)

    @contextlib.contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        with record_function(f"dflash.{stage}"):
            if not self._timed:
                yield
                return
            start = self._clock.now()
            yield
            self._measured.append((stage, start, self._clock.now()))

    def collect(self) -> dict[str, float]:
        """Return the seconds per stage since the server started, of stages that the device has finished."""
        while self._measured and self._clock.has_passed(self._measured[0][2]):
            stage, start, end = self._measured.popleft()
            self._seconds[stage] += self._clock.seconds(start, end)
        return dict(self._seconds)


class Steps:
    """The steps in flight. Each is returned once when its counts arrive, and once when its time does.

    A step's time ends at the start of the next decode step, so it includes the scheduler's work between the two.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._clock = Clock(device)
        self._uncounted: deque[StepRecord] = deque()
        self._untimed: deque[tuple[StepRecord, Any, Any]] = deque()
        self._last: tuple[StepRecord, Any] | None = None

    def started(self, record: StepRecord, *, timed: bool = True) -> None:
        now = self._clock.now() if timed or self._last is not None else None
        if self._last is not None:
            self._untimed.append((*self._last, now))
        self._last = (record, now) if timed else None
        self._uncounted.append(record)

    def interrupted(self) -> None:
        self._last = None

    def counted(self, accept_lens: Sequence[int]) -> StepRecord:
        # Counts arrive in launch order.
        record = self._uncounted.popleft()
        record.accept_lens = accept_lens
        if record.copied is not None:
            record.copied.arrived(accept_lens)
        return record

    def timed(self) -> list[StepRecord]:
        """Return the steps whose time has become available."""
        done = []
        while self._untimed and self._clock.has_passed(self._untimed[0][2]):
            record, start, end = self._untimed.popleft()
            record.milliseconds = self._clock.seconds(start, end) * 1000
            done.append(record)
        return done


class NotFinite:
    """Copies the drafter's count of non-finite positions to the host without blocking, and warns of the first.

    The target rejects such drafts, so no other figure shows that the drafter is broken.
    """

    def __init__(self, count: Tensor, warns: bool) -> None:
        self._count, self._warns, self._clock = count, warns, Clock(count.device)
        self._on_host = torch.zeros((), dtype=torch.int64, pin_memory=count.device.type != "cpu")
        self._reading: Any = None
        self.total = 0

    def read(self) -> None:
        if self._reading is None:
            self._on_host.copy_(self._count, non_blocking=True)
            self._reading = self._clock.now()

    def collect(self) -> int:
        if self._reading is not None and self._clock.has_passed(self._reading):
            self._reading, before, self.total = None, self.total, int(self._on_host)
            if self.total and not before and self._warns:
                logger.warning(
                    "DFLASH: the drafter's output is not finite at %d drafted positions. Output is unaffected; these "
                    "drafts are rejected. Fix: %s",
                    self.total,
                    FIXES[NOT_FINITE],
                )
        return self.total


_NOTHING: AbstractContextManager[None] = nullcontext()


def _unmarked(stage: str) -> AbstractContextManager[None]:
    return _NOTHING


class Observer:
    """Call ``started``, ``interrupted`` and ``finished``; read ``info``.

    Args:
        max_width: positions of the widest block.
        not_finite: int64 [] on the device, the drafter's count of non-finite positions.
        times_all: whether every step is timed, for a policy that learns from the times; else one of ``EVERY``.
        payoff: judges whether drafting pays; None on a rank that does not log.
    """

    def __init__(
        self,
        device: torch.device | str,
        max_width: int,
        not_finite: Tensor,
        payoff: Payoff | None = None,
        *,
        times_all: bool = True,
    ) -> None:
        self._steps, self._times_all = Steps(device), times_all
        self._stats, self._not_finite = StepStats(), NotFinite(not_finite, warns=payoff is not None)
        self._times_stages = os.environ.get(STAGE_TIMES) == "1"
        self._stages, self._metrics = Stages(device, self._times_stages), step_metrics(max_width)
        self._payoff, self._launched = payoff, 0

    def stages(self) -> Callable[[str], AbstractContextManager[None]]:
        """Return the function that marks the stages of one step."""
        # Only if a profiler records or stages are timed: a range costs several small ops.
        return self._stages if self._times_stages or torch.autograd._profiler_enabled() else _unmarked

    def started(self, record: StepRecord) -> None:
        """Register a decode step before its launch, on its stream."""
        self._steps.started(record, timed=self._times_all or self._launched % EVERY == 0)
        self._launched += 1
        if self._launched % EVERY == 0:
            self._not_finite.read()

    def interrupted(self) -> None:
        """Register that another forward is about to be launched."""
        self._steps.interrupted()

    def finished(self, accept_lens: Sequence[int], policy: WidthPolicy) -> tuple[StepRecord, list[StepRecord]]:
        """Count the oldest step in flight; return it, and all steps whose time has become available.

        Args:
            accept_lens: per request, accepted drafts plus the bonus token.
            policy: the width policy, before it observes this step.
        """
        record, timed = self._steps.counted(accept_lens), self._steps.timed()
        self._stats.count(record)
        self._stages.collect()
        not_finite, pays = self._not_finite.collect(), None
        if self._payoff is not None:
            self._payoff.count(record, policy, not_finite)
            pays = self._payoff.pays
        record.requests = ()
        if self._metrics is not None:
            self._metrics.observe(record, timed, policy, not_finite, pays)
        return record, timed

    def info(self, policy: WidthPolicy) -> dict[str, Any]:
        """Return counters and judgement for ``/server_info``."""
        not_finite, seconds = self._not_finite.collect(), self._stages.collect()
        drafting = None if self._payoff is None else self._payoff.section(policy)
        return {**self._stats.as_dict(), "broken_drafts": not_finite, "drafting": drafting, "stage_seconds": seconds}
