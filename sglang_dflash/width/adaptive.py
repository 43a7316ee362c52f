"""Adaptive width: the width with the most expected tokens per millisecond, for the current batch and traffic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_dflash.width.cost import CostTable
from sglang_dflash.width.explore import Explorer
from sglang_dflash.width.mixture import Mixture
from sglang_dflash.width.policy import Prospect

SWITCH_NOW, SWITCH_AFTER = 0.1, 0.3
"""Take another width at once if it gains this share, or once the gains passed up add to this many steps."""
PATIENCE = 32
"""Decisions in a row for plain decoding that make a pause."""


class AdaptiveWidth:
    """Maximise expected tokens per millisecond; see ``docs/tuning.md``.

    Survival is a property of the traffic, shared by all batch sizes; a step's cost depends on the batch size.

    Args:
        widths: ascending; plain decoding is a choice if 1 is among them.
        costs: a table over these widths; None starts without calibration and learns from the first steps.
        drafted: positions that the drafter drafts, if some widths exceed them: those are for copies. None is all.

    Raises:
        ValueError: the table has other widths.
    """

    def __init__(self, widths: Sequence[int], costs: CostTable | None = None, drafted: int | None = None) -> None:
        self.widths = tuple(widths)
        self.max_width = self.widths[-1]
        self.costs = costs or CostTable(self.widths)
        if self.costs.widths != self.widths:
            raise ValueError(f"a cost table of widths {self.costs.widths} for a policy of widths {self.widths}")
        drafted = min(drafted or self.max_width, self.max_width)
        self.rows = Mixture(self.widths, drafted)
        self.survival = self.rows.unmatched
        self.paused: Prospect | None = None
        self.tokens_per_ms = 0.0
        self._explorer = Explorer()
        self._drafted_columns = max(2, sum(width <= drafted for width in self.widths))
        self._best = 0
        self._missed_gains = 0.0
        self._plain_in_a_row = self._pauses = 0
        self._batch_size = self._context = 0
        self._steps = [0] * len(self.widths)
        self._chosen: dict[int, tuple[int, float]] = {}  # by batch size: width, tokens per millisecond

    def width(self, batch_size: int, context: int = 0, matching: float = 0.0) -> int:
        row, tokens = self.costs.row(batch_size, context), self.rows.tokens(matching)
        rates = [count / ms for count, ms in zip(tokens, row, strict=True)]
        self._decide(rates)
        news = batch_size != self._batch_size or context < self._context
        self._batch_size, self._context = batch_size, context
        self._watch(matching)
        # Without a match, a width beyond what the drafter drafts has nothing to show.
        end = len(row) if matching else max(self._drafted_columns, self._best + 1)
        column = self._explorer.column(
            self._best,
            row[:end],
            tokens[:end],
            lambda: self.costs.shortest(batch_size, context)[:end],
            suspicious=self.survival.seems_better or (matching > 0 and self.rows.matched.seems_better),
            news=news or (matching > 0 and self.rows.is_old),
        )
        self._steps[column] += 1
        self.tokens_per_ms = rates[column] * batch_size
        self._chosen[batch_size] = (self.widths[self._best], rates[self._best] * batch_size)
        return self.widths[column]

    @property
    def may_rest(self) -> bool:
        """Whether plain decoding is a choice beside blocks."""
        return self.widths[0] == 1 and len(self.widths) > 1

    def prospect(self, *, alone: bool = False) -> Prospect | None:
        """What the best block with a draft brings in a step like the last, where nothing is copied.

        None unless it may rest.

        Args:
            alone: with one request of its batch.
        """
        if not self.may_rest:
            return None
        size = 1 if alone else self._batch_size
        tokens, row = self.rows.of_unmatched, self.costs.row(size, self._context * size // max(self._batch_size, 1))
        best = max(range(1, self._drafted_columns), key=lambda column: tokens[column] / row[column])
        return Prospect(self.widths[best], self.survival.hazards[1], tokens[best], row[best] / row[0])

    def observe(self, width: int, accept_lens: Sequence[int], matched: Sequence[bool] = ()) -> None:
        self.rows.observe(width, accept_lens, matched)

    def observe_time(
        self, batch_size: int, width: int, context: int, milliseconds: float, at_most: bool = False
    ) -> None:
        self.costs.observe(batch_size, width, context, milliseconds, at_most)

    def fingerprint(self) -> int:
        # Of numbers, which Python hashes alike in every process.
        return hash((*self.rows.tokens(0.0), *self.rows.tokens(1.0), *self.costs.row(1)))

    def describe(self) -> dict[str, Any]:
        return {
            "policy": "adaptive",
            "widths": list(self.widths),
            "chosen": {
                str(batch_size): {"width": width, "tokens_per_ms": round(rate, 4)}
                for batch_size, (width, rate) in sorted(self._chosen.items())
            },
            "steps_by_width": {str(width): count for width, count in zip(self.widths, self._steps, strict=True)},
            "probes": self._explorer.probes,
            "probes_lost_ms": round(self._explorer.lost, 1),
            "paused": None if self.paused is None else str(self.paused),
            "pauses": self._pauses,
            "survival": self.survival.as_dict(),
            "survival_of_matched": self.rows.matched.as_dict(),
            "costs": self.costs.as_dict(),
        }

    def _decide(self, rates: Sequence[float]) -> None:
        """Update the best width. A small gain must last, so that noise alone does not change it."""
        most = max(rates)
        gain = most / rates[self._best] - 1
        self._missed_gains = self._missed_gains + gain if gain > 0 else 0.0
        if gain > SWITCH_NOW or self._missed_gains > SWITCH_AFTER:
            self._best, self._missed_gains = rates.index(most), 0.0

    def _watch(self, matching: float) -> None:
        """Begin a pause after ``PATIENCE`` decisions for plain decoding in a row; any other decision ends it.

        A block for the sake of copies says nothing about the drafter.
        """
        if self.widths[self._best] > 1:
            if not matching:
                self._plain_in_a_row, self.paused = 0, None
            return
        self._plain_in_a_row += 1
        if self._plain_in_a_row == PATIENCE and len(self.widths) > 1:
            self.paused = self.prospect()
            self._pauses += 1
