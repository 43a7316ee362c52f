"""Telemetry of the worker: counters, Prometheus series and the judgement whether drafting pays. It drives nothing."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sglang_dflash.causes import FIXES, NOT_FINITE
from sglang_dflash.width import WidthPolicy
from sglang_dflash.worker.flight import Clock, StepRecord
from sglang_dflash.worker.observe.metrics import StepStats, step_metrics
from sglang_dflash.worker.observe.payoff import Payoff

logger = logging.getLogger(__name__)

EVERY = 32  # steps between two reads of the drafter's count of non-finite drafts


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


class Observer:
    """Counts finished steps.

    Args:
        max_width: positions of the widest block.
        not_finite: int64 [] on the device, the drafter's count of non-finite positions.
        payoff: judges whether drafting pays; None on a rank that does not log.
    """

    def __init__(self, max_width: int, not_finite: Tensor, payoff: Payoff | None = None) -> None:
        self._stats, self._not_finite = StepStats(), NotFinite(not_finite, warns=payoff is not None)
        self._metrics, self._payoff, self._launched = step_metrics(max_width), payoff, 0

    def started(self) -> None:
        """Call on a decode step's stream before its launch."""
        self._launched += 1
        if self._launched % EVERY == 0:
            self._not_finite.read()

    def count(self, record: StepRecord, timed: Sequence[StepRecord], policy: WidthPolicy) -> None:
        """Count a finished step, and the steps whose time is new; ``policy`` has not observed this step yet."""
        self._stats.count(record)
        not_finite, pays = self._not_finite.collect(), None
        if self._payoff is not None:
            self._payoff.count(record, policy, not_finite)
            pays = self._payoff.pays
        if self._metrics is not None:
            self._metrics.observe(record, timed, policy, not_finite, pays)

    def info(self, policy: WidthPolicy) -> dict[str, Any]:
        """Return counters and judgement for ``/server_info``."""
        drafting = None if self._payoff is None else self._payoff.section(policy)
        return {**self._stats.as_dict(), "broken_drafts": self._not_finite.collect(), "drafting": drafting}
