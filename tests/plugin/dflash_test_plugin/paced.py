"""Mode ``paced``: steps take at least so long, as on a device of its own that is slower than this machine.

Servers that share a machine's cores then have the same speed alone and side by side, as long as the cores keep up.
``SGLANG_DFLASH_TEST_PACE`` has three numbers, milliseconds: of a prefill, of a decode step, of each request in it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

VARIABLE = "SGLANG_DFLASH_TEST_PACE"


class Pace:
    """A device that takes one step after the other.

    Args:
        prefill, step, request: milliseconds.
    """

    def __init__(self, prefill: float, step: float, request: float) -> None:
        self._prefill, self._step, self._request = prefill, step, request
        self._free = 0.0

    def prefill(self, original: Callable[..., Any], worker: Any, batch: Any, *rest: Any) -> Any:
        """Around ``DFlashWorker._prefill``."""
        self._take(self._prefill)
        return original(worker, batch, *rest)

    def decode(self, original: Callable[..., Any], worker: Any, batch: Any, *rest: Any) -> Any:
        """Around ``DFlashWorker._decode``."""
        self._take(self._step + self._request * batch.batch_size())
        return original(worker, batch, *rest)

    def _take(self, milliseconds: float) -> None:
        """Wait for the step before, as the device would; what the host does meanwhile costs no time of its own."""
        time.sleep(max(0.0, self._free - time.perf_counter()))
        self._free = time.perf_counter() + milliseconds / 1000


def from_environment() -> Pace:
    return Pace(*map(float, os.environ.get(VARIABLE, "0 0 0").split()))
