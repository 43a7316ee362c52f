"""What the host learns of a decode step, piece by piece: what was launched, how long it took, what it brought."""

from __future__ import annotations

import json
import logging
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch

from sglang_dflash.worker.observe.clock import Clock

logger = logging.getLogger(__name__)

STEP_LOG = "SGLANG_DFLASH_STEP_LOG"


@dataclass
class StepRecord:
    """One decode step.

    Attributes:
        width: positions of the block, anchor included.
        rids: the batch's requests.
        context: committed tokens of all of them, as far as the host knew.
        at: seconds since the server's first step.
        milliseconds: from the step's start to the next one's; None if something else ran between, or not known yet.
        accept_lens: accepted drafts plus bonus token of each request; empty before the host knows.
        verify_lens: verified positions of each request, anchor included; None if all were.
        caught_up: whether it injected what plain steps had left waiting, which is not part of its width's time.
    """

    width: int
    rids: list[str]
    context: int
    at: float = 0.0
    milliseconds: float | None = None
    accept_lens: Sequence[int] = ()
    verify_lens: Sequence[int] | None = None
    caught_up: bool = False
    timed: bool = field(default=False, repr=False)  # whether ``milliseconds`` is final

    @property
    def batch_size(self) -> int:
        return len(self.rids)


class Steps:
    """The steps in flight; each is handed out when its counts are known, and again when its time is.

    A step's time is that from its start to the start of the next decode step: what the scheduler adds between two steps
    is part of it. On an accelerator the starts are events on its stream; nothing waits for them.

    Args:
        device: that runs the steps.
        log: whether this process writes the log that ``SGLANG_DFLASH_STEP_LOG`` asks for.
    """

    def __init__(self, device: torch.device | str, *, log: bool) -> None:
        self._clock = Clock(device)
        self._began = time.perf_counter()
        self._uncounted: deque[StepRecord] = deque()
        self._untimed: deque[tuple[StepRecord, Any, Any]] = deque()
        self._last: tuple[StepRecord, Any] | None = None
        path = os.environ.get(STEP_LOG)
        self._log = StepLog(Path(path)) if path and log else None

    def started(self, record: StepRecord) -> None:
        """A decode step is about to be launched."""
        now = self._clock.now()
        if self._last is not None:
            self._untimed.append((*self._last, now))
        self._last = record, now
        record.at = time.perf_counter() - self._began
        self._uncounted.append(record)
        if self._log is not None:
            self._log.expect(record)

    def interrupted(self, prefilled: Sequence[str] = (), tokens: int = 0) -> None:
        """Something else than a decode step is about to be launched: a prefill of these requests' ``tokens``."""
        if self._last is not None:
            self._last[0].timed = True
            self._last = None
        if self._log is not None and prefilled:
            self._log.prefill(time.perf_counter() - self._began, prefilled, tokens)

    def counted(self, accept_lens: Sequence[int]) -> StepRecord:
        """The oldest step without counts has these; steps come in launch order."""
        record = self._uncounted.popleft()
        record.accept_lens = accept_lens
        return record

    def timed(self) -> list[StepRecord]:
        """Steps whose time has become known."""
        done = []
        while self._untimed and self._clock.has_passed(self._untimed[0][2]):
            record, start, end = self._untimed.popleft()
            record.milliseconds = self._clock.seconds(start, end) * 1000
            record.timed = True
            done.append(record)
        if self._log is not None:
            self._log.write()
        return done


class StepLog:
    """JSON lines, one a step and one a prefill, in launch order; what ``sglang-dflash bench simulate`` reads.

    A decode step: ``at`` (seconds), ``rids``, ``width``, ``verify`` and ``accept`` (positions and tokens of each
    request), ``context``, ``ms``. A prefill: ``at``, ``rids``, ``tokens``.
    """

    def __init__(self, path: Path) -> None:
        self._file: IO[str] | None = path.open("w", encoding="utf-8")
        self._unwritten: deque[StepRecord | dict[str, Any]] = deque()

    def expect(self, record: StepRecord) -> None:
        """Write it once all of it is known."""
        self._unwritten.append(record)

    def prefill(self, at: float, rids: Sequence[str], tokens: int) -> None:
        self._unwritten.append({"at": at, "kind": "prefill", "rids": list(rids), "tokens": tokens, "ms": None})

    def write(self) -> None:
        """Write what is known by now. A disk that takes no more ends the log, not the server."""
        lines = []
        while self._unwritten:
            entry = self._unwritten[0]
            if isinstance(entry, StepRecord):
                if not entry.accept_lens or not entry.timed:
                    break
                entry = {
                    "at": entry.at, "kind": "decode", "rids": entry.rids, "width": entry.width,
                    "verify": entry.verify_lens, "accept": entry.accept_lens, "context": entry.context,
                    "ms": entry.milliseconds,
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
