"""When to try a width that is not the best one, and at what price."""

from __future__ import annotations

from collections.abc import Sequence

BUDGET = 0.01
"""Share of the time that probes may lose."""
SAVED, OWED = 4.0, 4.0
"""Steps' worth of lost time that may be saved for a probe, and that a burst of successful ones may owe."""
UP_EVERY, DOWN_EVERY = 8, 128
"""Steps between probes of the next wider width at least, and of the next narrower one."""


class Explorer:
    """Probes the neighbours of the width in use, within a budget of lost time.

    A wider probe shows whether drafts survive further than thought; its evidence is new. A narrower one only shows what
    that width costs now, so it is rare. A probe loses the time that its expected tokens would not have taken at the
    width in use; each step earns a share of its own time, and a probe must be affordable. Where one costs little (a
    wider block on an idle device) it comes every ``UP_EVERY`` steps; where it loses half a step, every 50.

    A wider probe that paid, with more tokens per millisecond than the width in use, is followed at once by another, one
    width further if there is one: so even one request alone brings enough evidence within a few steps.

    Args:
        first: columns to visit first, whatever they cost: a table without calibration needs each once or twice.
    """

    def __init__(self, first: Sequence[int] = ()) -> None:
        self._first = list(reversed(first))
        self._allowance = 0.0
        self._since_up = self._since_down = 0
        self._burst: int | None = None  # the last column that paid, and what to exceed
        self._pending: tuple[int, float] | None = None
        self.probes = 0
        self.lost = 0.0

    def column(self, best: int, row: Sequence[float], tokens: Sequence[float]) -> int:
        """The column to use in this step: ``best``, or a probe.

        Args:
            best: column of the width in use.
            row: milliseconds of a step by column.
            tokens: expected tokens per request of a step by column.
        """
        if self._first:
            return self._first.pop()
        self._allowance = min(self._allowance + BUDGET * row[best], SAVED * row[best])
        self._since_up += 1
        self._since_down += 1
        burst, self._burst = self._burst, None
        if burst is not None and burst > best:
            probe, allowance = min(burst + 1, len(row) - 1), self._allowance + OWED * row[best]
        elif self._pending is not None and self._since_up < UP_EVERY:
            return best
        elif self._since_up >= UP_EVERY and best + 1 < len(row):
            probe, allowance = best + 1, self._allowance
        elif self._since_down >= DOWN_EVERY and best > 0:
            probe, allowance = best - 1, self._allowance
        else:
            return best
        rate = tokens[best] / row[best]
        loss = max(row[probe] - tokens[probe] / rate, 0.0)
        if loss > allowance:
            return best
        self._allowance -= loss
        self.lost += loss
        self.probes += 1
        if probe > best:
            self._since_up = 0
            self._pending = (probe, row[probe] * rate)
        else:
            self._since_down = 0
        return probe

    def observe(self, column: int, tokens: float) -> None:
        """Take note of a finished step: tokens per request of a step at this column."""
        if self._pending is not None and column == self._pending[0]:
            if tokens > self._pending[1]:
                self._burst = column
            self._pending = None
