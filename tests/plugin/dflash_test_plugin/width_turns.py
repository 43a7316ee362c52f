"""Mode ``width_turns``: fixed widths and the server's own policy take turns of ``STEPS`` decode steps in one server.

Under one load all of them meet the same requests and the same moods of the machine. The file that
``SGLANG_DFLASH_TEST_TURNS_FILE`` names gets a line a decode step: whose turn it was. For a server of one rank.
"""

from __future__ import annotations

import os
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

    def width(self, *args: Any, **kwargs: Any) -> int:
        turn, step = divmod(self._steps, STEPS)
        arm = ARMS[turn % len(ARMS)]
        if step == 0:
            self.choose(arm)
        self._steps += 1
        with self._file.open("a") as file:
            file.write(arm + "\n")
        return super().width(*args, **kwargs)
