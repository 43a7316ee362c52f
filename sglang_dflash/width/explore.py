"""When to try a width that is not the best one, and at what price."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

REGULAR, CLOSER, DOUBT = 0.006, 0.002, 0.001
"""Shares of the time that probes may lose: regular ones, those on a suspicion, those of a doubtful cost."""
DEAREST = 0.5
"""Steps' worth of time that one probe on a suspicion may be expected to lose."""
UP_EVERY, DOWN_EVERY, DOUBT_EVERY = 8, 128, 4
"""Steps at least between probes of a wider width, of a narrower one, and of a doubtful cost."""


class Purse:
    """Time that probes may lose: a share of every step's own, saved up to some steps' worth."""

    def __init__(self, share: float, most: float, steps: float = 0.0) -> None:
        self._share, self._most, self._start = share, most, steps
        self._milliseconds: float | None = None

    def earn(self, step: float) -> None:
        saved = self._start * step if self._milliseconds is None else self._milliseconds
        self._milliseconds = min(saved + self._share * step, self._most * step)

    @property
    def milliseconds(self) -> float:
        return self._milliseconds or 0.0

    def pay(self, milliseconds: float) -> None:
        self._milliseconds = self.milliseconds - milliseconds


class Look(NamedTuple):
    """A probe on a suspicion, until its outcome is known."""

    column: int
    rate: float  # tokens per millisecond and request, had it used the best width
    milliseconds: float


class Explorer:
    """Probes other widths, within a budget of lost time.

    A probe loses the time in which the best width would have made the same tokens. It waits until its expected loss is
    affordable, from a purse that every step fills with a share of its own time:

    - Regular: the next wider width shows whether drafts survive further than thought, every ``UP_EVERY`` steps where it
      costs little, every 80 where it loses half a step. The next narrower one, rarely, shows what it costs now.
    - Suspicion: while drafts seem to survive better than thought, probes follow each other at once, as wide as is not
      too dear, so that even one request alone brings enough evidence within a few steps. They are charged what they
      really lost: those that succeed pay for themselves.
    - Doubt: a width that would be the best if its step were as short as its table entry is uncertain.

    Args:
        first: columns to visit first, whatever they cost: a table without calibration needs each once or twice.
    """

    def __init__(self, first: Sequence[int] = ()) -> None:
        self._first = list(reversed(first))
        self._regular, self._closer, self._doubt = Purse(REGULAR, 1), Purse(CLOSER, 1), Purse(DOUBT, 3, steps=3)
        self._since_up = self._since_down = self._since_doubt = 0
        self._look: Look | None = None
        self.probes = 0
        self.lost = 0.0

    def column(
        self,
        best: int,
        row: Sequence[float],
        tokens: Sequence[float],
        suspicious: bool,
        shortest: Callable[[], Sequence[float]],
    ) -> int:
        """The column to use in this step: ``best``, or a probe.

        Args:
            best: column of the best width.
            row: milliseconds of a step by column.
            tokens: expected tokens per request of a step by column.
            suspicious: drafts seem to survive better than ``tokens`` says.
            shortest: what ``row`` may be, for all that is known.
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
        if suspicious and wider and self._look is None:
            most = min(DEAREST * step, self._closer.milliseconds)
            near = [c for c in range(best + 1, len(row)) if row[c] - tokens[c] / rate <= most]
            if near:
                self._look = Look(near[-1], rate, row[near[-1]])
                self.probes += 1
                return near[-1]
        if wider and self._since_up >= UP_EVERY and self._afford(self._regular, best + 1, rate, row, tokens):
            self._since_up = 0
            return best + 1
        if best and self._since_down >= DOWN_EVERY and self._afford(self._regular, best - 1, rate, row, tokens):
            self._since_down = 0
            return best - 1
        if self._since_doubt >= DOUBT_EVERY:
            self._since_doubt = 0
            rates = [count / ms for count, ms in zip(tokens, shortest(), strict=True)]
            rates[best] = rate
            most = max(rates)
            if most > rate and self._afford(self._doubt, rates.index(most), rate, row, tokens):
                return rates.index(most)
        return best

    def observe(self, column: int, tokens: float) -> None:
        """Take note of a finished step: tokens per request of a step at this column."""
        look = self._look
        if look is not None and column == look.column:
            self._pay(self._closer, look.milliseconds - tokens / look.rate)
            self._look = None

    def _afford(self, purse: Purse, probe: int, rate: float, row: Sequence[float], tokens: Sequence[float]) -> bool:
        """Pay for a probe of this column if the purse holds enough."""
        loss = max(row[probe] - tokens[probe] / rate, 0.0)
        if loss > purse.milliseconds:
            return False
        self._pay(purse, loss)
        self.probes += 1
        return True

    def _pay(self, purse: Purse, milliseconds: float) -> None:
        purse.pay(milliseconds)
        self.lost += milliseconds
