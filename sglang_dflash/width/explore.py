"""When to try a width that is not the best one, and at what price."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

BUDGET, SAVED = 0.008, 1.0
"""Share of the time that probes may lose, and how many steps' worth of it may be saved for later."""
CLOSER, CLOSER_SAVED = 0.002, 1.0
"""The same for a closer look at what looks like a change."""
DEAREST = 0.5
"""Steps' worth of time that one probe of a closer look may be expected to lose."""
UP_EVERY, DOWN_EVERY = 8, 128
"""Steps at least between probes of a wider width, and of a narrower one."""


class Look(NamedTuple):
    """A probe of a closer look, until its outcome is known."""

    column: int
    rate: float  # tokens per millisecond and request, had it used the best width
    milliseconds: float


class Explorer:
    """Probes the neighbours of the best width, within a budget of lost time.

    A wider probe shows whether drafts survive further than thought. A narrower one only shows what that width costs
    now, so it is rare. A probe loses the time in which the best width would have made the same tokens; every step earns
    a share of its own time, and a probe waits until its expected loss is affordable. So it comes every ``UP_EVERY``
    steps where a wider block costs little, and every 60 where it loses half a step.

    While drafts seem to survive better than thought, probes follow each other at once, as wide as is not too dear, so
    that even one request alone brings enough evidence within a few steps. They have a smaller budget of their own and
    are charged what they really lost: those that succeed pay for themselves.

    Args:
        first: columns to visit first, whatever they cost: a table without calibration needs each once or twice.
    """

    def __init__(self, first: Sequence[int] = ()) -> None:
        self._first = list(reversed(first))
        self._allowance = self._closer = 0.0  # milliseconds
        self._since_up = self._since_down = 0
        self._look: Look | None = None
        self.probes = 0
        self.lost = 0.0

    def column(self, best: int, row: Sequence[float], tokens: Sequence[float], suspicious: bool) -> int:
        """The column to use in this step: ``best``, or a probe.

        Args:
            best: column of the best width.
            row: milliseconds of a step by column.
            tokens: expected tokens per request of a step by column.
            suspicious: drafts seem to survive better than ``tokens`` says.
        """
        if self._first:
            return self._first.pop()
        step = row[best]
        self._allowance = min(self._allowance + BUDGET * step, SAVED * step)
        self._closer = min(self._closer + CLOSER * step, CLOSER_SAVED * step)
        self._since_up += 1
        self._since_down += 1
        rate, wider = tokens[best] / step, best + 1 < len(row)
        if suspicious and wider and self._look is None:
            most = min(DEAREST * step, self._closer)
            near = [c for c in range(best + 1, len(row)) if row[c] - tokens[c] / rate <= most]
            if near:
                self._look = Look(near[-1], rate, row[near[-1]])
                self.probes += 1
                return near[-1]
        if wider and self._since_up >= UP_EVERY:
            probe = best + 1
        elif best and self._since_down >= DOWN_EVERY:
            probe = best - 1
        else:
            return best
        loss = max(row[probe] - tokens[probe] / rate, 0.0)
        if loss > self._allowance:
            return best
        self._allowance -= loss
        self.lost += loss
        self.probes += 1
        if probe > best:
            self._since_up = 0
        else:
            self._since_down = 0
        return probe

    def observe(self, column: int, tokens: float) -> None:
        """Take note of a finished step: tokens per request of a step at this column."""
        look = self._look
        if look is not None and column == look.column:
            loss = look.milliseconds - tokens / look.rate
            self._closer -= loss
            self.lost += loss
            self._look = None
