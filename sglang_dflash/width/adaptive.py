"""The width that brings the most tokens per millisecond, for the batch and the traffic of the moment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_dflash.width.breaker import Breaker, Pause
from sglang_dflash.width.cost import CostTable
from sglang_dflash.width.explore import Explorer
from sglang_dflash.width.survival import Survival

SWITCH_NOW, SWITCH_AFTER = 0.1, 0.3
"""Another width is taken at once if it gains this share, or once the gains not taken add up to this many steps."""
LEAST_CUT, MOST_CUT = 0.02, 0.9
"""A threshold below the first cuts nothing worth it; none is above the second."""


class AdaptiveWidth:
    """Expected tokens per millisecond, maximised; see ``docs/width.md``.

    Survival belongs to the traffic and is shared by all batch sizes; what a step costs belongs to the batch size.

    Args:
        widths: ascending, 1 among them if plain decoding is a choice.
        costs: a table of these widths; None starts without calibration and learns from the first steps.
        ragged: whether requests are cut inside a batch.

    Raises:
        ValueError: the table is of other widths.
    """

    def __init__(self, widths: Sequence[int], costs: CostTable | None = None, *, ragged: bool = True) -> None:
        self.widths = tuple(widths)
        self.max_width = self.widths[-1]
        self.costs = costs or CostTable(self.widths)
        if self.costs.widths != self.widths:
            raise ValueError(f"a cost table of widths {self.costs.widths} for a policy of widths {self.widths}")
        self.survival = Survival(self.max_width)
        self.ragged = ragged
        every_column = range(len(self.widths))
        self._explorer = Explorer(() if self.costs.points else [*every_column, *every_column])
        self._breaker = Breaker()
        self._column_of = {width: column for column, width in enumerate(self.widths)}
        self._tokens = self._expected()
        self._best = 0
        self._column = 0  # of the last step: `_best`, or a probe
        self._gains_missed = 0.0
        self._batch_size = self._context = 0
        self._steps = [0] * len(self.widths)
        self._by_batch_size: dict[int, tuple[int, float]] = {}
        self.tokens_per_ms = 0.0

    @property
    def paused(self) -> Pause | None:
        return self._breaker.pause

    def width(self, batch_size: int, context: int = 0) -> int:
        row, tokens = self.costs.row(batch_size, context), self._tokens
        rates = [count / ms for count, ms in zip(tokens, row, strict=True)]
        self._decide(rates)
        self._watch(row)
        others = batch_size != self._batch_size or context < self._context
        self._batch_size, self._context = batch_size, context
        column = self._column = self._explorer.column(
            self._best,
            row,
            tokens,
            lambda: self.costs.shortest(batch_size, context),
            suspicious=self.survival.seems_better,
            others=others,
        )
        self._steps[column] += 1
        self.tokens_per_ms = rates[column] * batch_size
        self._by_batch_size[batch_size] = (self._best, rates[self._best] * batch_size)
        return self.widths[column]

    def observe(self, width: int, accept_lens: Sequence[int], verify_lens: Sequence[int] | None = None) -> None:
        self.survival.observe(width, accept_lens, verify_lens)
        column = self._column_of.get(width)
        if column is None or not accept_lens:
            return
        if width > 1:
            self._tokens = self._expected()
        self._explorer.observe(column, sum(accept_lens) / len(accept_lens))

    def observe_time(
        self, batch_size: int, width: int, context: int, milliseconds: float, at_most: bool = False
    ) -> None:
        self.costs.observe(batch_size, width, context, milliseconds, at_most)

    def cut(self, batch_size: int) -> float:
        """A drafted position is verified while its chance of being committed outweighs what it costs.

        The batch makes ``tokens_per_ms`` now; verifying one position more takes some ms, in which it would have made
        their product of tokens. So the position must bring at least as many.
        """
        width = self.widths[self._column]
        if not self.ragged or width == 1:
            return 0.0
        threshold = self.tokens_per_ms * self.costs.cut(batch_size, width).per_token
        return 0.0 if threshold < LEAST_CUT else min(threshold, MOST_CUT)

    def least_cut(self, batch_size: int) -> float:
        return self.costs.cut(batch_size, self.widths[self._column]).least

    def describe(self) -> dict[str, Any]:
        return {
            "policy": "adaptive",
            "widths": list(self.widths),
            "ragged": self.ragged,
            "chosen": {
                str(batch_size): {"width": self.widths[column], "tokens_per_ms": round(rate, 4)}
                for batch_size, (column, rate) in sorted(self._by_batch_size.items())
            },
            "steps_by_width": {str(width): count for width, count in zip(self.widths, self._steps, strict=True)},
            "probes": self._explorer.probes,
            "probes_lost_ms": round(self._explorer.lost, 1),
            "paused": None if self.paused is None else str(self.paused),
            "pauses": self._breaker.pauses,
            "survival": self.survival.as_dict(),
            "costs": self.costs.as_dict(),
        }

    def _expected(self) -> list[float]:
        return [self.survival.expected_tokens(width) for width in self.widths]

    def _decide(self, rates: Sequence[float]) -> None:
        """Hysteresis: a small gain must last, so that noise alone does not change the width."""
        most = max(rates)
        gain = most / rates[self._best] - 1
        self._gains_missed = self._gains_missed + gain if gain > 0 else 0.0
        if gain > SWITCH_NOW or self._gains_missed > SWITCH_AFTER:
            self._best, self._gains_missed = rates.index(most), 0.0

    def _watch(self, row: Sequence[float]) -> None:
        if self.widths[self._best] > 1:
            self._breaker.drafting()
        elif self._breaker.plain() and len(self.widths) > 1:
            hazard, tokens = self.survival.hazards[1], self._tokens[1]
            self._breaker.begin(Pause(self.widths[1], hazard, tokens, row[1] / row[0]))
