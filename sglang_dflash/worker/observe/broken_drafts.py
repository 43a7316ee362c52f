"""Drafts that are not finite: the target rejects them, so only a counter shows that the drafter is broken."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from sglang_dflash.worker.observe.stats import Clock

logger = logging.getLogger(__name__)


class BrokenDrafts:
    """Reads the drafter's count of positions with a NaN or an infinity, without waiting, and warns of the first.

    Args:
        count: int64 [], counted on the device.
        speaks: whether this rank warns.
    """

    def __init__(self, count: Tensor, speaks: bool) -> None:
        self._count, self._speaks, self._clock = count, speaks, Clock(count.device)
        self._seen = torch.zeros((), dtype=torch.int64, pin_memory=count.device.type != "cpu")
        self._reading: Any = None
        self.total = 0

    def read(self) -> None:
        """Start a copy to the host, on the stream that counts."""
        if self._reading is None:
            self._seen.copy_(self._count, non_blocking=True)
            self._reading = self._clock.now()

    def collect(self) -> int:
        """-> positions so far, as far as the host knows."""
        if self._reading is not None and self._clock.has_passed(self._reading):
            self._reading, known, self.total = None, self.total, int(self._seen)
            if self.total and not known and self._speaks:
                logger.warning(
                    "DFLASH: the drafter's output is not finite at %d drafted positions. The text stays the target's; "
                    "these drafts are refused. Compare the drafter's dtype and files with its card",
                    self.total,
                )
        return self.total
