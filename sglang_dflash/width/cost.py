"""Milliseconds of a decode step by batch size and width: calibrated at start-up, corrected by measured steps.

The table holds the calibrated times, linear between their batch sizes. Without calibration it is a guess whose scale
the first step sets. Measured steps correct it through a Kalman filter (`width/filter.py`), in which one outlier moves a
settled table by some 5 %. Predicted times never fall with batch size or width, whatever was measured.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from math import exp, inf, sqrt
from operator import le
from typing import Any

from sglang_dflash.width.filter import StepTimeFilter

DOUBT = 1.5
"""Standard deviations by which an entry may be too high."""
GUESSED_BATCH_SIZES, GUESSED_TOKEN_SHARE = (1, 2, 4, 8, 16, 32, 64), 0.05
"""Without calibration: the table's batch sizes, and the share of a step's fixed time that each verified token adds."""


class CostTable:
    """Predicted step times.

    Args:
        widths: ascending.
        points: measured milliseconds by (batch size, width), at next to no context: all widths, at some batch sizes. A
            batch size beyond them costs what the nearest does. Without points, nothing is calibrated.

    Raises:
        KeyError: a width was not measured at each of the batch sizes.
    """

    def __init__(self, widths: Sequence[int], points: Mapping[tuple[int, int], float] | None = None) -> None:
        self.widths = tuple(widths)
        self.is_calibrated = bool(points)
        points = points or {
            (batch_size, width): 1 + GUESSED_TOKEN_SHARE * batch_size * width
            for batch_size in GUESSED_BATCH_SIZES
            for width in self.widths
        }
        self.batch_sizes = tuple(sorted({batch_size for batch_size, _ in points}))
        self._base = [[points[batch_size, width] for width in self.widths] for batch_size in self.batch_sizes]
        self._corrected = [row[:] for row in self._base]
        self._filter = StepTimeFilter(len(self._base), len(self.widths), self.is_calibrated, self._base[0][0])
        self._by_width: list[Sequence[float]] = list(self._corrected)
        self._table = self._monotone(range(len(self._base)))
        self.measured = 0

    @classmethod
    def calibrated(cls, points: Mapping[tuple[int, int], float], widths: Sequence[int] | None = None) -> CostTable:
        """Make a table from measured milliseconds by (batch size, width); the widths default to those measured."""
        return cls(widths or sorted({width for _, width in points}), points)

    @property
    def per_token(self) -> float:
        """Milliseconds per token of the batch's context."""
        return self._filter.per_token

    def row(self, batch_size: int, context: int = 0) -> list[float]:
        """Predict a step -> milliseconds, in the order of ``widths``."""
        return self._filter.milliseconds(self._forwards(batch_size), batch_size, context)

    def shortest(self, batch_size: int, context: int = 0) -> list[float]:
        """Bound a step from below, by ``DOUBT`` standard deviations of the table -> milliseconds, as :meth:`row`."""
        low, high, share = self._between(batch_size)
        below, above = self._filter.variance[low], self._filter.variance[high]
        forwards = (
            ms * exp(-DOUBT * sqrt((1 - share) ** 2 * under + share**2 * over))
            for ms, under, over in zip(self._forwards(batch_size), below, above, strict=True)
        )
        return self._filter.milliseconds(forwards, batch_size, context)

    def observe(self, batch_size: int, width: int, context: int, milliseconds: float, at_most: bool = False) -> None:
        """Learn from a measured step; ignore a width that the table does not have.

        Args:
            at_most: the step did extra work, so it can only show that the prediction is too high.
        """
        if width not in self.widths or not 0 < milliseconds < inf:
            return
        column = self.widths.index(width)
        if at_most and milliseconds >= self.row(batch_size, context)[column]:
            return
        low, high, share = self._between(batch_size)
        table_ms = (1 - share) * self._corrected[low][column] + share * self._corrected[high][column]
        if not self.is_calibrated and not self.measured:
            self._filter.start(milliseconds / table_ms)
        self._filter.learn(((low, 1 - share), (high, share)), column, table_ms, batch_size, context, milliseconds)
        for near in (low, high):
            self._corrected[near][column] = self._base[near][column] * exp(self._filter.correction[near][column])
        self._table = self._monotone((low, high))
        self.measured += 1

    def _forwards(self, batch_size: int) -> list[float]:
        low, high, share = self._between(batch_size)
        pairs = zip(self._table[low], self._table[high], strict=True)
        # The second pass of `_monotone` may undo a little of the first.
        return list(accumulate((below + share * (above - below) for below, above in pairs), max))

    def _between(self, batch_size: int) -> tuple[int, int, float]:
        """Find the table's rows around a batch size -> lower, higher, share of the higher one."""
        sizes = self.batch_sizes
        high = bisect_right(sizes, batch_size)
        if not 0 < high < len(sizes):
            edge = min(high, len(sizes) - 1)
            return edge, edge, 0.0
        return high - 1, high, (batch_size - sizes[high - 1]) / (sizes[high] - sizes[high - 1])

    def _monotone(self, changed: Iterable[int]) -> list[Sequence[float]]:
        """Make the corrected table monotone; where neighbours disagree, the better known one counts more."""
        variance = self._filter.variance
        for row in changed:
            self._by_width[row] = isotonic(self._corrected[row], variance[row])
        if all(all(map(le, row, above)) for row, above in pairwise(self._by_width)):
            return self._by_width[:]
        columns = zip(*self._by_width, strict=True)
        by_batch_size = map(isotonic, columns, zip(*variance, strict=True))
        return list(zip(*by_batch_size, strict=True))

    def __str__(self) -> str:
        rows = ((size, " ".join(f"{ms:.1f}" for ms in self.row(size))) for size in self.batch_sizes)
        return "ms a step by width, " + ", ".join(f"batch size {size}: {row}" for size, row in rows)

    def as_dict(self) -> dict[str, Any]:
        """The part of ``/server_info``, ready for JSON."""
        return {
            "widths": list(self.widths),
            "batch_sizes": list(self.batch_sizes),
            "milliseconds": [[round(ms, 4) for ms in self.row(batch_size)] for batch_size in self.batch_sizes],
            "per_token": self.per_token,
            "calibrated": self.is_calibrated,
            "drift": round(self._filter.scale, 4),
            "outside": [round(ms, 4) for ms in self._filter.outside],
            "measured": self.measured,
        }


def isotonic(values: Sequence[float], variances: Sequence[float]) -> Sequence[float]:
    """Minimise the squared distances over their variances (pool adjacent violators)."""
    if list(values) == sorted(values):
        return values
    pools: list[tuple[float, float, int]] = []  # mean, weight, members
    for value, variance in zip(values, variances, strict=True):
        weight, count = 1 / variance, 1
        while pools and pools[-1][0] > value:
            mean, mass, members = pools.pop()
            value = (mean * mass + value * weight) / (mass + weight)
            weight, count = mass + weight, count + members
        pools.append((value, weight, count))
    return [mean for mean, _, members in pools for _ in range(members)]
