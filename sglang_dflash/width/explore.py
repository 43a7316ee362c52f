"""Probes: steps at another width than the best one, to learn what it brings or costs now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

SCHEDULED, PROMPTED = 0.006, 0.003
"""Shares of the time that probes may lose: on a schedule, and for a reason."""
SAVED = 3.0
"""Steps' worth of time that a purse saves at most, so also the most that a probe may be expected to lose."""
HARDLY = 0.1
"""Steps' worth more than the next wider width that a still wider one may lose, to be probed in its place."""
EVERY, OUTCOME, DOUBT_EVERY = 8, 2, 4
"""Steps from one probe of a wider width to the next: on a schedule, and on a suspicion, when the outcome of the last
one is known; and between looks for a doubtful cost."""


class Purse:
    """Time that probes may lose: a share of each step's own, saved up."""

    def __init__(self, share: float, milliseconds: float) -> None:
        self._share, self._milliseconds = share, milliseconds

    def earn(self, step: float) -> None:
        self._milliseconds = min(self._milliseconds + self._share * step, SAVED * step)

    def pay(self, loss: float, credit: float = 0.0) -> bool:
        """Pay if the purse holds enough; with credit, unless it is in debt already."""
        if loss > self._milliseconds + (credit if self._milliseconds >= 0 else 0.0):
            return False
        self._milliseconds -= max(loss, 0.0)
        return True


class Explorer:
    """Chooses the steps that probe, within a budget of lost time.

    A probe is expected to lose the time in which the best width would make the same tokens. A purse, filled with a
    share of each step's own time, must hold that loss. There are two reasons to probe:

    - A wider width shows whether drafts survive further than thought. It is the next one, or the widest that hardly
      loses more. A look comes on a schedule, ahead of savings when there is news of the batch, and while drafts seem to
      survive better than thought, as soon as the outcome of the last look is known, from a purse of its own: so even
      one request alone brings enough evidence within a few steps.
    - A width would be the best if its step were as short as its table entry is uncertain. Each visit settles the entry,
      and without calibration this visits the widths.
    """

    def __init__(self) -> None:
        self._scheduled, self._prompted = Purse(SCHEDULED, 0.0), Purse(PROMPTED, inf)
        self._steps = self._since_look = 0
        self.probes = 0
        self.lost = 0.0  # milliseconds

    def column(
        self,
        best: int,
        row: Sequence[float],
        tokens: Sequence[float],
        shortest: Callable[[], Sequence[float]],
        *,
        suspicious: bool = False,
        news: bool = False,
    ) -> int:
        """Choose the column for this step: ``best``, or a probe.

        Args:
            best: column of the best width.
            row: milliseconds of a step by column.
            tokens: expected tokens per request of a step by column.
            shortest: returns a lower bound of ``row``.
            suspicious: drafts seem to survive better than ``tokens`` says.
            news: the batch is not that of the last step, or its copies are of unknown worth.
        """
        step = row[best]
        rate = tokens[best] / step
        losses = [ms - count / rate for ms, count in zip(row, tokens, strict=True)]
        self._scheduled.earn(step)
        self._prompted.earn(step)
        self._steps += 1
        self._since_look += 1
        probe = None
        if best + 1 < len(row) and self._since_look >= (OUTCOME if suspicious else EVERY):
            most = max(losses[best + 1], 0.0) + HARDLY * step
            wider = max(column for column in range(best + 1, len(row)) if losses[column] <= most)
            purse = self._prompted if suspicious else self._scheduled
            if purse.pay(losses[wider], SAVED * step if news else 0.0):
                self._since_look, probe = 0, wider
        if probe is None and self._steps % DOUBT_EVERY == 0:
            rates = [count / ms for count, ms in zip(tokens, shortest(), strict=True)]
            rates[best] = rate
            doubtful = rates.index(max(rates))
            if rates[doubtful] > rate and self._prompted.pay(losses[doubtful]):
                probe = doubtful
        if probe is None:
            return best
        self.probes += 1
        self.lost += losses[probe]
        return probe
