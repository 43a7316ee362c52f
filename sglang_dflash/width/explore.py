"""When to try a width that is not the best one, and at what price."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

REGULAR, CLOSER, DOUBT = 0.006, 0.002, 0.001
"""Shares of the time that probes may lose: regular ones, those on a suspicion, those of a doubtful cost."""
SAVED = 3.0
"""Steps' worth of time that a purse holds at most, and so a probe may be expected to lose."""
DEAREST = 0.5
"""Steps' worth that one on a suspicion may lose, unless none is cheaper."""
HARDLY = 0.1
"""Steps' worth that a wider width may lose more than the next one, to be tried in its place."""
UP_EVERY, DOWN_EVERY, DOUBT_EVERY = 8, 128, 4
"""Steps at least between probes of a wider width, of a narrower one, and of a doubtful cost."""


class Purse:
    """Time that probes may lose: a share of every step's own, saved up to ``SAVED`` steps' worth."""

    def __init__(self, share: float, *, full: bool = False) -> None:
        self._share = share
        self.milliseconds = inf if full else 0.0

    def earn(self, step: float) -> None:
        self.milliseconds = min(self.milliseconds + self._share * step, SAVED * step)


class Look(NamedTuple):
    """A probe on a suspicion, until its outcome is known."""

    column: int
    rate: float  # tokens per millisecond and request, had it used the best width
    milliseconds: float


class Explorer:
    """Probes other widths, within a budget of lost time.

    A probe loses the time in which the best width would have made the same tokens. It waits until its expected loss is
    affordable, from a purse that every step fills with a share of its own time:

    - Regular: a wider width shows whether drafts survive further than thought, every ``UP_EVERY`` steps where it costs
      little, every 80 where it loses half a step; when a request comes or goes, ahead of what was saved. It is the next
      one, or the widest that hardly loses more. The next narrower one, rarely, shows what it costs now.
    - Suspicion: while drafts seem to survive better than thought, probes follow each other at once, as wide as is not
      too dear, so that even one request alone brings enough evidence within a few steps. They are charged what they
      really lost: those that succeed pay for themselves.
    - Doubt: a width that would be the best if its step were as short as its table entry is uncertain.

    Args:
        first: columns to visit first, whatever they cost: a table without calibration needs each once or twice.
    """

    def __init__(self, first: Sequence[int] = ()) -> None:
        self._first = list(reversed(first))
        self._regular, self._closer, self._doubt = Purse(REGULAR), Purse(CLOSER), Purse(DOUBT, full=True)
        self._since_up = self._since_down = self._since_doubt = 0
        self._look: Look | None = None
        self.probes = 0
        self.lost = 0.0

    def column(
        self,
        best: int,
        row: Sequence[float],
        tokens: Sequence[float],
        shortest: Callable[[], Sequence[float]],
        *,
        suspicious: bool = False,
        others: bool = False,
    ) -> int:
        """The column to use in this step: ``best``, or a probe.

        Args:
            best: column of the best width.
            row: milliseconds of a step by column.
            tokens: expected tokens per request of a step by column.
            shortest: what ``row`` may be, for all that is known.
            suspicious: drafts seem to survive better than ``tokens`` says.
            others: the batch's requests are not those of the last step.
        """
        if self._first:
            return self._first.pop()
        step = row[best]
        for purse in (self._regular, self._closer, self._doubt):
            purse.earn(step)
        self._since_up += 1
        self._since_down += 1
        self._since_doubt += 1
        rate, wider = tokens[best] / step, best + 1 < len(row)
        losses = [ms - count / rate for ms, count in zip(row, tokens, strict=True)]
        if suspicious and wider and self._look is None:
            near = [c for c in range(best + 1, len(row)) if losses[c] <= DEAREST * step]
            column = near[-1] if near else min(range(best + 1, len(row)), key=losses.__getitem__)
            if losses[column] <= self._closer.milliseconds:
                self._look = Look(column, rate, row[column])
                self.probes += 1
                return column
        if wider and self._since_up >= UP_EVERY:
            most = max(losses[best + 1], 0.0) + HARDLY * step
            column = max(c for c in range(best + 1, len(row)) if losses[c] <= most)
            if self._afford(self._regular, losses[column], SAVED * step if others else 0.0):
                self._since_up = 0
                return column
        if best and self._since_down >= DOWN_EVERY and self._afford(self._regular, losses[best - 1]):
            self._since_down = 0
            return best - 1
        if self._since_doubt >= DOUBT_EVERY:
            self._since_doubt = 0
            rates = [count / ms for count, ms in zip(tokens, shortest(), strict=True)]
            rates[best] = rate
            column = rates.index(max(rates))
            if rates[column] > rate and self._afford(self._doubt, losses[column]):
                return column
        return best

    def observe(self, column: int, tokens: float) -> None:
        """Take note of a finished step: tokens per request of a step at this column."""
        look = self._look
        if look is not None and column == look.column:
            self._pay(self._closer, look.milliseconds - tokens / look.rate)
            self._look = None

    def _afford(self, purse: Purse, loss: float, credit: float = 0.0) -> bool:
        """Pay for a probe if the purse, not in debt yet, holds enough or may borrow it."""
        if loss > purse.milliseconds + (credit if purse.milliseconds >= 0 else 0.0):
            return False
        self._pay(purse, max(loss, 0.0))
        self.probes += 1
        return True

    def _pay(self, purse: Purse, milliseconds: float) -> None:
        purse.milliseconds -= milliseconds
        self.lost += milliseconds
