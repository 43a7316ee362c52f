"""Milliseconds of a decode step by batch size and width: calibrated at start-up, corrected by measured steps.

A prediction is the calibrated time, linear between batch sizes, times a correction per cell and a common drift.
Predictions never fall with width.
"""

from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate
from math import exp, inf, log
from typing import Any

FADING = 0.05  # weight of the newest step in a mean of many
OUTLIER = 0.5  # clamp of log(measured / predicted): an outlier moves a settled cell by 5 %


class CostTable:
    """Predicted step times; a batch size outside the measured ones has the time of the nearest.

    Args:
        points: milliseconds by (batch size, width), with almost no context.
    """

    def __init__(self, points: Mapping[tuple[int, int], float]) -> None:
        self.widths = tuple(sorted({width for _, width in points}))
        self.batch_sizes = tuple(sorted({batch_size for batch_size, _ in points}))
        self._cells = [[points[batch_size, width] for width in self.widths] for batch_size in self.batch_sizes]
        self._steps = [[0.0] * len(self.widths) for _ in self.batch_sizes]
        self._drift = 1.0
        self.measured = 0

    def row(self, batch_size: int) -> list[float]:
        """Return the predicted milliseconds by width."""
        return list(accumulate(self._times(batch_size), max))

    def observe(self, batch_size: int, width: int, milliseconds: float, at_most: bool = False) -> None:
        """Correct the table by a measured step; with ``at_most``, downwards only."""
        if width not in self.widths or not 0 < milliseconds < inf:
            return
        column = self.widths.index(width)
        predicted = self._times(batch_size)[column]
        error = max(-OUTLIER, min(OUTLIER, log(milliseconds / predicted)))
        if at_most and error >= 0:
            return
        to_drift = max(FADING, 1 / (1 + self.measured))
        self._drift *= exp(to_drift * error)
        low, high, share = self._between(batch_size)
        for row, part in ((low, 1 - share), (high, share)):
            self._steps[row][column] += part
            weight = part * max(FADING, 1 / (1 + self._steps[row][column]))
            self._cells[row][column] *= exp(weight * (1 - to_drift) * error)
        self.measured += 1

    def _times(self, batch_size: int) -> list[float]:
        low, high, share = self._between(batch_size)
        return [self._drift * (a + share * (b - a)) for a, b in zip(self._cells[low], self._cells[high], strict=True)]

    def _between(self, batch_size: int) -> tuple[int, int, float]:
        sizes = self.batch_sizes
        high = bisect_right(sizes, batch_size)
        if not 0 < high < len(sizes):
            edge = min(high, len(sizes) - 1)
            return edge, edge, 0.0
        return high - 1, high, (batch_size - sizes[high - 1]) / (sizes[high] - sizes[high - 1])

    def as_dict(self) -> dict[str, Any]:
        return {
            "widths": list(self.widths),
            "batch_sizes": list(self.batch_sizes),
            "milliseconds": [[round(ms, 4) for ms in self.row(batch_size)] for batch_size in self.batch_sizes],
            "drift": round(self._drift, 4),
            "measured": self.measured,
        }
