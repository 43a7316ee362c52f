"""Adaptive width: the most expected tokens per millisecond, for the current batch and traffic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_dflash.width.costs import CostTable
from sglang_dflash.width.policy import BUCKET, Prospect, WidthPolicy
from sglang_dflash.width.survival import SurvivalByMatch

# switch at once for this gain, or once missed gains add up to this many steps
SWITCH_NOW, SWITCH_AFTER = 0.1, 0.3
PATIENCE = 32  # consecutive decisions for plain decoding that make a pause
SCHEDULED, PROMPTED = 0.006, 0.003  # shares of the time that probes may lose
SAVED = 3.0  # in steps: the largest budget, and the maximum expected loss of a probe
MORE = 0.1  # extra loss, in steps, accepted for probing a wider width than the next one
# steps between probes: of a wider width, while drafts may have improved, of a doubtful cost
EVERY, EVERY_IF_BETTER, DOUBT_EVERY = 8, 2, 4


class Budget:
    """Milliseconds that probes may lose: a share of each step's time."""

    def __init__(self, share: float) -> None:
        self._share, self.milliseconds = share, 0.0

    def earn(self, step: float) -> None:
        self.milliseconds = min(self.milliseconds + self._share * step, SAVED * step)

    def spend(self, loss: float, credit: float = 0.0) -> bool:
        # Allow credit only while the balance is not negative.
        if loss > self.milliseconds + (credit if self.milliseconds >= 0 else 0.0):
            return False
        self.milliseconds -= max(loss, 0.0)
        return True


class AdaptiveWidth(WidthPolicy):
    """Maximise expected tokens per millisecond; see ``docs/settings.md``.

    Args:
        costs: a table over the widths; plain decoding is a choice if 1 is among them.
        drafted: positions that the drafter drafts; wider widths are for copies.
    """

    def __init__(self, costs: CostTable, drafted: int | None = None) -> None:
        super().__init__(*costs.widths)
        self.costs = costs
        self._drafted = drafted = min(drafted or self.widths[-1], self.widths[-1])
        self.forget()
        self.can_pause = self.widths[0] == 1 and len(self.widths) > 1 and drafted > 1
        self.tokens_per_ms = 0.0
        self._scheduled, self._prompted = Budget(SCHEDULED), Budget(PROMPTED)
        self._steps = self._since_wider = self._probes = 0
        # without a match, widths beyond the drafter's block cannot help; one block is always a choice
        self._drafted_columns = max(min(2, drafted), sum(width <= drafted for width in self.widths))
        self._best = 0
        self._missed_gains = 0.0
        self._plain_in_a_row = self._pauses = 0
        self._batch_size = self._context = 0

    def width(self, batch_size: int, context: int = 0, matches: Sequence[int] = ()) -> int:
        row, tokens = self.costs.row(batch_size), self.by_match.tokens(self.widths[self._best], matches)
        matching = any(matches[1:])
        rates = [count / ms for count, ms in zip(tokens, row, strict=True)]
        self._decide(rates)
        changed = batch_size != self._batch_size or context < self._context
        self._batch_size, self._context = batch_size, context
        self._count_pauses(matching)
        end = len(row) if matching else max(self._drafted_columns, self._best + 1)
        improved = self.survival.may_have_improved or (matching and self.by_match.matched.may_have_improved)
        column = self._probe(row[:end], tokens[:end], improved=improved, changed=changed)
        self._probes += column != self._best
        self.tokens_per_ms = rates[column] * batch_size
        return self.widths[column]

    def prospect(self, *, alone: bool = False) -> Prospect | None:
        if not self.can_pause:
            return None
        tokens, row = self.by_match.tokens(self.widths[self._best]), self.costs.row(1 if alone else self._batch_size)
        best = max(range(1, self._drafted_columns), key=lambda column: tokens[column] / row[column])
        return Prospect(self.widths[best], self.survival.hazards[1], tokens[best], row[best] / row[0])

    def observe(self, width: int, accept_lens: Sequence[int], buckets: Sequence[int] = ()) -> None:
        self.by_match.observe(width, accept_lens, buckets)

    def forget(self) -> None:
        self.by_match = SurvivalByMatch(self.widths, self._drafted)
        self.survival, self.paused = self.by_match.unmatched, None

    def observe_time(self, batch_size: int, width: int, milliseconds: float, at_most: bool = False) -> None:
        self.costs.observe(batch_size, width, milliseconds, at_most)

    def fingerprint(self) -> int:
        # hashes of numbers are the same in every process
        survival = (tokens for each in (*self.by_match.buckets, self.by_match.matched) for tokens in each.tokens)
        explored = self._steps, self._since_wider, self._scheduled.milliseconds, self._prompted.milliseconds
        return hash((self._best, self._missed_gains, *explored, *self.costs.row(1), *survival))

    def describe(self) -> dict[str, Any]:
        return {
            "policy": "adaptive",
            "widths": list(self.widths),
            "probes": self._probes,
            "paused": None if self.paused is None else str(self.paused),
            "pauses": self._pauses,
            "survival": self.survival.as_dict(),
            "survival_of_matched": self.by_match.matched.as_dict(),
            "survival_by_match_length": {
                str(bucket * BUCKET): survival.as_dict() for bucket, survival in enumerate(self.by_match.buckets[1:], 1)
            },
            "costs": self.costs.as_dict(),
        }

    def _decide(self, rates: Sequence[float]) -> None:
        # a small gain must last, so that noise alone does not change the best width
        most = max(rates)
        gain = most / rates[self._best] - 1
        self._missed_gains = self._missed_gains + gain if gain > 0 else 0.0
        if gain > SWITCH_NOW or self._missed_gains > SWITCH_AFTER:
            self._best, self._missed_gains = rates.index(most), 0.0

    def _probe(self, row: Sequence[float], tokens: Sequence[float], *, improved: bool, changed: bool) -> int:
        # A probe loses the time in which the best width would commit the same tokens. Probe wider on credit when the
        # batch has changed, and from a separate budget if drafts may have improved; or a width that may be the best at
        # its lower bound.
        best = self._best
        step, rate = row[best], tokens[best] / row[best]
        losses = [ms - count / rate for ms, count in zip(row, tokens, strict=True)]
        if not self._steps:
            self._prompted.milliseconds = SAVED * step
        self._scheduled.earn(step)
        self._prompted.earn(step)
        self._steps += 1
        self._since_wider += 1
        if best + 1 < len(row) and self._since_wider >= (EVERY_IF_BETTER if improved else EVERY):
            most = max(losses[best + 1], 0.0) + MORE * step
            wider = max(column for column in range(best + 1, len(row)) if losses[column] <= most)
            budget = self._prompted if improved else self._scheduled
            if budget.spend(losses[wider], SAVED * step if changed else 0.0):
                self._since_wider = 0
                return wider
        if self._steps % DOUBT_EVERY == 0:
            bounds = self.costs.lower_bounds(self._batch_size)[: len(row)]
            rates = [count / ms for count, ms in zip(tokens, bounds, strict=True)]
            rates[best] = rate
            doubtful = rates.index(max(rates))
            if rates[doubtful] > rate and self._prompted.spend(losses[doubtful]):
                return doubtful
        return best

    def _count_pauses(self, matching: bool) -> None:
        if self.widths[self._best] > 1:
            if not matching:  # a block chosen for its copies is no evidence for the drafter
                self._plain_in_a_row, self.paused = 0, None
            return
        self._plain_in_a_row += 1
        if self._plain_in_a_row == PATIENCE and self.can_pause:
            self.paused = self.prospect()
            self._pauses += 1
