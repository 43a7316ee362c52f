"""Mode ``width_turns``: fixed widths and the server's own policy take turns of ``STEPS`` decode steps in one server.

Under one load all of them meet the same requests and the same moods of the machine. The file that
``SGLANG_DFLASH_TEST_TURNS_FILE`` names gets a line a decode step: whose turn it was. Beside it, ``.steps`` gets what
each step brought, in the same order. For a server of one rank.
"""

from __future__ import annotations

import json
import os
from collections import deque
from pathlib import Path
from typing import Any

from dflash_test_plugin.width_switch import OWN, Switched
from sglang_dflash.width import WidthPolicy

ARMS = ("1", "2", "4", "8", "16", OWN)
STEPS = 12
VARIABLE = "SGLANG_DFLASH_TEST_TURNS_FILE"


def take_turns(worker: Any, *args: Any, **kwargs: Any) -> None:
    """Before ``DFlashWorker._prefill``."""
    if not isinstance(worker.width_policy, Turns):
        worker.width_policy = Turns(worker.width_policy)


class Turns(Switched):
    def __init__(self, own: WidthPolicy) -> None:
        super().__init__(own)
        self._steps = 0
        self._file = Path(os.environ[VARIABLE])
        self._file.write_text("")
        Path(os.environ[VARIABLE] + ".steps").write_text("")

    def width(self, *args: Any, **kwargs: Any) -> int:
        turn, step = divmod(self._steps, STEPS)
        arm = ARMS[turn % len(ARMS)]
        if step == 0:
            self.choose(arm)
        self._steps += 1
        with self._file.open("a") as file:
            file.write(arm + "\n")
        return super().width(*args, **kwargs)


_records: deque[Any] = deque()  # steps that are not written yet
_settled: set[int] = set()  # of them, those whose time is known, or never will be


def step_started(_: None, steps: Any, record: Any) -> None:
    """After ``Steps.started``."""
    _records.append(record)


def step_interrupted(steps: Any) -> None:
    """Before ``Steps.interrupted``."""
    if steps._last is not None:
        _settled.add(id(steps._last[0]))


def write_steps(timed: list[Any], steps: Any) -> list[Any]:
    """After ``Steps.timed``: requests, accept lengths and milliseconds (null if something ran between) of each step."""
    _settled.update(map(id, timed))
    with Path(os.environ[VARIABLE] + ".steps").open("a") as file:
        while _records and _records[0].accept_lens and id(_records[0]) in _settled:
            record = _records.popleft()
            _settled.remove(id(record))
            row = {"users": record.batch_size, "accept": list(record.accept_lens), "ms": record.milliseconds}
            file.write(json.dumps(row) + "\n")
    return timed
