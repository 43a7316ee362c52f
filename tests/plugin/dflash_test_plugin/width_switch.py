"""Mode ``width_switch``: the width policy of a running server, changed from outside.

The file that ``SGLANG_DFLASH_TEST_WIDTH_FILE`` names is read at every prefill: it has the width of every block from
there on, or ``own`` for the policy that the server was started with. For a server of one rank: two ranks might read at
different times.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_dflash.width import FixedWidth, WidthPolicy

OWN = "own"
VARIABLE = "SGLANG_DFLASH_TEST_WIDTH_FILE"


def follow_file(worker: Any, *args: Any, **kwargs: Any) -> None:
    """Before ``DFlashWorker._prefill``."""
    if not isinstance(worker.width_policy, Switched):
        worker.width_policy = Switched(worker.width_policy)
    file = Path(os.environ[VARIABLE])
    if file.exists():
        worker.width_policy.choose(file.read_text().strip())


class Switched:
    """Asks one of several policies, and tells each of its own steps alone.

    Args:
        own: the policy that the server was started with; ``widths`` and ``max_width`` stay this one's.
    """

    def __init__(self, own: WidthPolicy) -> None:
        self._own = self._chosen = own
        self._asked: deque[WidthPolicy] = deque()  # by steps that are not observed yet
        self.widths, self.max_width = own.widths, own.max_width

    def choose(self, width: str) -> None:
        self._chosen = self._own if width == OWN else FixedWidth(int(width))

    def width(self, *args: Any, **kwargs: Any) -> int:
        self._asked.append(self._chosen)
        return self._chosen.width(*args, **kwargs)

    def observe(self, width: int, accept_lens: Sequence[int], *args: Any, **kwargs: Any) -> None:
        self._asked.popleft().observe(width, accept_lens, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """The rest goes to the chosen policy. A time may come after a switch, and holds whoever asked for the width."""
        return getattr(self._chosen, name)
