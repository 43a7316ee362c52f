"""The one object that a worker tells about its steps; counters, times, metrics and log lines are behind it."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sglang_dflash.width import WidthPolicy
from sglang_dflash.worker.copies import Copied
from sglang_dflash.worker.observe.broken_drafts import BrokenDrafts
from sglang_dflash.worker.observe.metrics import step_metrics
from sglang_dflash.worker.observe.payoff import Payoff
from sglang_dflash.worker.observe.stats import STAGE_TIMES, Clock, Stages, StepStats

if TYPE_CHECKING:
    from sglang_dflash.upstream import Req

READ_EVERY = 32  # steps between two looks at the count of broken drafts


@dataclass
class StepRecord:
    """One decode step.

    Attributes:
        width: positions of the block, anchor included.
        batch_size: requests.
        context: committed tokens of all of them, as far as the host knew.
        milliseconds: from the step's start to the next one's; None if something else ran between, or not known yet.
        accept_lens: accepted drafts plus bonus token of each request; empty before the host knows.
        matched: whether each request had a match to copy, as far as the host knew at the start; empty where no block is
            copied.
        copied: what it copied; None where no block is copied.
        requests: SGLang's, until the step is counted.
        caught_up: whether it injected what plain steps had left waiting, which is not part of its width's time.
    """

    width: int
    batch_size: int
    context: int
    milliseconds: float | None = None
    accept_lens: Sequence[int] = ()
    matched: Sequence[bool] = ()
    copied: Copied | None = None
    requests: Sequence[Req] = ()
    caught_up: bool = False


class Steps:
    """The steps in flight; each is handed out when its counts are known, and again when its time is.

    A step's time runs from its start to the start of the next decode step, so it includes what the scheduler adds
    between two steps.

    Args:
        device: that runs the steps.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._clock = Clock(device)
        self._uncounted: deque[StepRecord] = deque()
        self._untimed: deque[tuple[StepRecord, Any, Any]] = deque()
        self._last: tuple[StepRecord, Any] | None = None

    def started(self, record: StepRecord) -> None:
        """A decode step is about to be launched."""
        now = self._clock.now()
        if self._last is not None:
            self._untimed.append((*self._last, now))
        self._last = record, now
        self._uncounted.append(record)

    def interrupted(self) -> None:
        """Something other than a decode step is about to be launched: the last step's time stays unknown."""
        self._last = None

    def counted(self, accept_lens: Sequence[int]) -> StepRecord:
        """The oldest step without counts has these; steps come in launch order."""
        record = self._uncounted.popleft()
        record.accept_lens = accept_lens
        if record.copied is not None:
            record.copied.arrived(accept_lens)
        return record

    def timed(self) -> list[StepRecord]:
        """Steps whose time has become known."""
        done = []
        while self._untimed and self._clock.has_passed(self._untimed[0][2]):
            record, start, end = self._untimed.popleft()
            record.milliseconds = self._clock.seconds(start, end) * 1000
            done.append(record)
        return done


class Observer:
    """Started, interrupted, finished, info.

    Args:
        device: that runs the steps.
        max_width: of any step.
        broken: the drafter's count of broken drafts, int64 [].
        payoff: judges whether drafting pays; None on a rank that does not log.
    """

    def __init__(
        self, device: torch.device | str, max_width: int, broken: Tensor, payoff: Payoff | None = None
    ) -> None:
        self._steps = Steps(device)
        self._stats, self._broken = StepStats(), BrokenDrafts(broken, speaks=payoff is not None)
        self._times_stages = os.environ.get(STAGE_TIMES) == "1"
        self._stages, self._metrics = Stages(device, self._times_stages), step_metrics(max_width)
        self._payoff, self._launched = payoff, 0

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Mark a stage of the step, on demand only: a range costs as much as several small operators."""
        return self._stages(name) if self._times_stages or torch.autograd._profiler_enabled() else nullcontext()

    def started(self, record: StepRecord) -> None:
        """A decode step is about to be launched; on its stream."""
        self._steps.started(record)
        self._launched += 1
        if self._launched % READ_EVERY == 0:
            self._broken.read()

    def interrupted(self) -> None:
        """Something other than a decode step is about to be launched."""
        self._steps.interrupted()

    def finished(self, accept_lens: Sequence[int], policy: WidthPolicy) -> tuple[StepRecord, list[StepRecord]]:
        """The oldest step in flight brought ``accept_lens``.

        Args:
            policy: has not learned of this step yet.

        Returns:
            The step, and all steps whose time has become known.
        """
        record, timed = self._steps.counted(accept_lens), self._steps.timed()
        self._stats.count(record)
        self._stages.collect()
        broken, pays = self._broken.collect(), None
        if self._payoff is not None:
            self._payoff.count(record, policy, broken)
            pays = self._payoff.pays
        record.requests = ()
        if self._metrics is not None:
            self._metrics.observe(record, timed, policy, broken, pays)
        return record, timed

    def info(self, policy: WidthPolicy) -> dict[str, Any]:
        """Counters and judgement for ``/server_info``."""
        broken, seconds = self._broken.collect(), self._stages.collect()
        drafting = None if self._payoff is None else self._payoff.section(policy)
        return {**self._stats.as_dict(), "broken_drafts": broken, "drafting": drafting, "stage_seconds": seconds}
