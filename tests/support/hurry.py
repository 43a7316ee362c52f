"""Time without waiting, for tests of what takes minutes."""

from __future__ import annotations

import asyncio


class Hurry(asyncio.SelectorEventLoop):
    """A loop whose clock jumps to whatever is due next."""

    clock = 0.0

    def time(self) -> float:
        return self.clock

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:
            self.clock = max(self.clock, self._scheduled[0].when())
        super()._run_once()
