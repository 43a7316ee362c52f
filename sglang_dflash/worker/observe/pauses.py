"""One log line when the drafter rests, and not one for every rest of a traffic that comes and goes."""

from __future__ import annotations

import logging
import time

from sglang_dflash.width import Pause

logger = logging.getLogger(__name__)

QUIET_SECONDS = 600.0


class PauseLog:
    """Tells of a pause when it begins, if it has told of none for a while.

    Args:
        speaks: whether this rank does.
    """

    def __init__(self, speaks: bool) -> None:
        self._speaks = speaks
        self._told = -QUIET_SECONDS
        self._last: Pause | None = None

    def tell(self, pause: Pause | None) -> None:
        """The policy's pause after a step; None while it drafts."""
        began, self._last = pause is not None and pause is not self._last, pause
        if began and self._speaks and time.monotonic() - self._told >= QUIET_SECONDS:
            self._told = time.monotonic()
            logger.info("DFLASH: %s", pause)
