"""Every step as a line of JSON, in the file that ``SGLANG_DFLASH_STEP_LOG`` names."""

from __future__ import annotations

import json
import logging
import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_dflash.worker.observe.observer import StepRecord

logger = logging.getLogger(__name__)

STEP_LOG = "SGLANG_DFLASH_STEP_LOG"


class StepLog:
    """One line per step and per prefill, in launch order.

    A decode step: ``at`` (seconds), ``rids``, ``width``, ``accept`` (tokens of each request), ``context``, ``ms``. A
    prefill: ``at``, ``rids``, ``tokens``.
    """

    def __init__(self, path: Path) -> None:
        self._file: IO[str] | None = path.open("w", encoding="utf-8")
        self._unwritten: deque[StepRecord | dict[str, Any]] = deque()

    @classmethod
    def asked_for(cls) -> StepLog | None:
        path = os.environ.get(STEP_LOG)
        return cls(Path(path)) if path else None

    def expect(self, record: StepRecord) -> None:
        """Write it once all of it is known."""
        self._unwritten.append(record)

    def prefill(self, at: float, rids: Sequence[str], tokens: int) -> None:
        self._unwritten.append({"at": at, "kind": "prefill", "rids": list(rids), "tokens": tokens, "ms": None})

    def write(self) -> None:
        """Write what is known by now. A full disk ends the log, not the server."""
        lines = []
        while self._unwritten:
            entry = self._unwritten[0]
            if not isinstance(entry, dict):
                if not entry.accept_lens or not entry.timed:
                    break
                entry = {
                    "at": entry.at, "kind": "decode", "rids": entry.rids, "width": entry.width,
                    "accept": entry.accept_lens, "context": entry.context, "ms": entry.milliseconds,
                }  # fmt: skip
            self._unwritten.popleft()
            lines.append(json.dumps(entry) + "\n")
        if self._file is None:
            return
        try:
            self._file.writelines(lines)
            self._file.flush()
        except OSError as error:
            logger.warning("DFLASH: %s ends here: %s", STEP_LOG, error)
            self._file = None
