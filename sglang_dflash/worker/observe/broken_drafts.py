"""Drafts of a drafter whose output is not finite: the target refuses them, so only a counter shows it is broken."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from sglang_dflash.worker.observe.clock import Clock

logger = logging.getLogger(__name__)

READ_EVERY = 32  # drafting steps


class BrokenDrafts:
    """Counts drafted positions whose hidden state holds a NaN or an infinity, and warns of the first.

    Args:
        device: that counts; the host reads the count now and then, and waits for nothing.
        speaks: whether this rank warns.
    """

    def __init__(self, device: torch.device | str, speaks: bool) -> None:
        self._count = torch.zeros((), dtype=torch.int64, device=device)
        self._clock, self._speaks = Clock(device), speaks
        pinned = self._count.device.type != "cpu"
        self._seen = torch.zeros((), dtype=torch.int64, pin_memory=pinned)
        self._reading: Any = None
        self._steps = 0
        self.total = 0

    def add(self, positions: Tensor) -> None:
        """Count a step's, int64 []; on the stream of the step."""
        self._count += positions
        self._steps += 1
        if self._steps % READ_EVERY == 0 and self._reading is None:
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
