"""Milliseconds of a decode step by batch size and width: calibrated at start-up, corrected by measured steps.

    ms(batch, width, context) = base(batch, width) * exp(drift + correction(batch, width)) + per_token * context

``base`` is the calibrated grid, linear between its batch sizes and beyond them; without calibration it is a plane that
is refitted to the cells seen so far. ``drift`` is the whole machine getting slower or faster, ``correction`` where a
cell differs from its calibration, ``per_token`` the K/V that a step reads, for all widths alike.

A Kalman filter on the logarithm tracks them. How an error is shared follows from how well each is known: the first
measurement of a cell corrects the cell, an error in a well-known cell moves the machine, unvisited cells with it, and
one that goes with the context moves ``per_token``. An error counts for at most three standard deviations of what was
expected, so that an outlier moves a settled table by some 5 %.

What is read never falls with batch size or width, whatever was measured.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from math import exp, log, sqrt
from typing import Any

from sglang_dflash.width import grid

NOISE = 0.1**2
"""Variance of a measured step. All variances are those of logarithms."""
DRIFT_STEP, CELL_STEP = 1.5e-4, 4e-6
"""Variance that a step adds: the machine's drift follows within some 20 steps, a cell within some 100 of its own."""
DRIFT, CALIBRATED, GUESSED = 0.5**2, 0.15**2, 0.3**2
"""Variance before any measurement: of the drift, and of a cell with and without calibration."""
OUTLIER = 3.0
"""Standard deviations beyond which an error counts no further."""
DOUBT = 1.5
"""Standard deviations by which an entry is doubted."""
DOUBLING_CONTEXT = 32768
"""Context at which ``per_token`` is first thought to double a plain step, give or take all of it."""


class CostTable:
    """What a step costs.

    Args:
        widths: ascending.
        points: measured milliseconds by (batch size, width), at next to no context; may be empty.
        per_token: milliseconds per committed token of the batch.
    """

    def __init__(self, widths: Sequence[int], points: grid.Points | None = None, per_token: float = 0.0) -> None:
        self.widths = tuple(widths)
        self.points = dict(points or {})
        self.per_token = per_token
        self.measured = 0
        self.batch_sizes = grid.rows(self.points)
        self._base = grid.complete(self.points, self.batch_sizes, self.widths)
        self._drift = 0.0
        # Covariance of drift and per_token; a cell's error is taken as independent of theirs.
        slope = (self._base[0][0] / DOUBLING_CONTEXT) ** 2
        self._drift_drift, self._drift_slope, self._slope_slope = DRIFT, 0.0, slope
        cell = CALIBRATED if self.points else GUESSED
        n, m = len(self.batch_sizes), len(self.widths)
        self._correction = [[0.0] * m for _ in range(n)]
        self._variance = [[cell] * m for _ in range(n)]
        self._visits = [[0] * m for _ in range(n)]
        self._cells = [list(row) for row in self._base]  # base with its correction
        self._by_width = [list(row) for row in self._base]  # the same, not falling with the width
        self._settle(range(n))  # makes `_table`, which does not fall with batch size either
        self._scale = 1.0  # exp(drift)

    @classmethod
    def calibrated(
        cls, points: Mapping[tuple[int, int], float], widths: Sequence[int] | None = None, per_token: float = 0.0
    ) -> CostTable:
        """A table of measured milliseconds by (batch size, width); the widths default to those measured."""
        return cls(widths or sorted({width for _, width in points}), points, per_token)

    def row(self, batch_size: int, context: int = 0) -> list[float]:
        """-> milliseconds of a step, by width in the order of ``widths``."""
        low, part = self._between(batch_size)
        scale, shift, most, row = self._scale, self.per_token * context, 0.0, []
        if 0 <= part <= 1:
            for below, above in zip(self._table[low], self._table[low + 1], strict=True):
                most = max(most, below + part * (above - below))
                row.append(most * scale + shift)
        else:
            edge = low if part < 0 else low + 1
            for column, ms in enumerate(self._table[edge]):
                most = max(most, ms * self._beyond(batch_size, edge, column, low, part))
                row.append(most * scale + shift)
        return row

    def shortest(self, batch_size: int, context: int = 0) -> list[float]:
        """-> milliseconds by width that a step may take at least, for all that is known: ``DOUBT`` deviations less."""
        low, part = self._between(batch_size)
        share = min(max(part, 0.0), 1.0)
        return [
            ms * exp(-DOUBT * sqrt((1 - share) * (1 - share) * below + share * share * above))
            for ms, below, above in zip(
                self.row(batch_size, context), self._variance[low], self._variance[low + 1], strict=True
            )
        ]

    def milliseconds(self, batch_size: int, width: int, context: int = 0) -> float:
        """A step's time at any width, on the line through the two nearest widths of the table."""
        row = self.row(batch_size, context)
        return row[0] if len(row) == 1 else grid.along(list(zip(self.widths, row, strict=True)), width)

    def per_verified_token(self, batch_size: int, width: int) -> float:
        """Milliseconds that one more verified token of one request costs at this width.

        Taken from the calibrated grid where there is one: steps measured under a ragged cut verified fewer tokens than
        their width says.
        """
        column = max(bisect_right(self.widths, width) - 1, min(1, len(self.widths) - 1))
        if column == 0:
            return 0.0
        low, part = self._between(batch_size)
        source, share = (self._base if self.points else self._table), min(max(part, 0.0), 1.0)
        wide, narrow = (source[low][c] + share * (source[low + 1][c] - source[low][c]) for c in (column, column - 1))
        size = min(max(batch_size, self.batch_sizes[0]), self.batch_sizes[-1])
        return max(wide - narrow, 0.0) * self._scale / (size * (self.widths[column] - self.widths[column - 1]))

    def observe(self, batch_size: int, width: int, context: int, milliseconds: float) -> None:
        """Learn from a measured step; a width that the table does not have is left out."""
        if width not in self.widths or not 0 < milliseconds < float("inf"):
            return
        column = self.widths.index(width)
        low, part = self._between(batch_size)
        share = min(max(part, 0.0), 1.0)
        lower, upper = self._cells[low], self._cells[low + 1]
        expected = lower[column] + share * (upper[column] - lower[column])
        if not 0 <= part <= 1:
            expected *= self._beyond(batch_size, low if part < 0 else low + 1, column, low, part)
        if not self.points and not self.measured:  # nothing is known of this machine but this
            self._drift, self._scale = log(milliseconds / expected), milliseconds / expected
            self._slope_slope *= self._scale**2
        expected = expected * self._scale + self.per_token * context
        reach = context / expected  # of the logarithm, per millisecond per token
        drift = self._drift_drift + DRIFT_STEP
        of_drift = drift + reach * self._drift_slope
        of_slope = self._drift_slope + reach * self._slope_slope
        first, second = self._variance[low], self._variance[low + 1]
        of_first, of_second = (1 - share) * first[column], share * second[column]
        total = of_drift + reach * of_slope + (1 - share) * of_first + share * of_second + NOISE
        most = OUTLIER * sqrt(total)
        gain = min(max(log(milliseconds / expected), -most), most) / total
        self._drift += of_drift * gain
        self.per_token = max(self.per_token + of_slope * gain, 0.0)
        self._drift_drift = drift - of_drift * of_drift / total
        self._drift_slope -= of_drift * of_slope / total
        self._slope_slope -= of_slope * of_slope / total
        self._correction[low][column] += of_first * gain
        self._correction[low + 1][column] += of_second * gain
        first[column] += (1 - share) * CELL_STEP - of_first * of_first / total
        second[column] += share * CELL_STEP - of_second * of_second / total
        self._scale = exp(self._drift)
        self.measured += 1
        row = low + (share >= 0.5)
        self._visits[row][column] += 1
        for near in (low, low + 1):
            self._cells[near][column] = self._base[near][column] * exp(self._correction[near][column])
        if not self.points and self._visits[row][column].bit_count() == 1:
            self._refit()
        else:
            self._settle((low, low + 1))

    def _between(self, batch_size: int) -> tuple[int, float]:
        """-> a row, and how far the batch size is on the way to the next one: below 0 or above 1 outside the grid."""
        low = min(max(bisect_right(self.batch_sizes, batch_size) - 1, 0), len(self.batch_sizes) - 2)
        below = self.batch_sizes[low]
        return low, (batch_size - below) / (self.batch_sizes[low + 1] - below)

    def _beyond(self, batch_size: int, edge: int, column: int, low: int, part: float) -> float:
        """What a batch size outside the grid costs over the grid's edge; at least its share of the requests."""
        base, ms = self._base, self._base[edge][column]
        outside = base[low][column] + part * (base[low + 1][column] - base[low][column])
        if edge == low:
            return min(max(outside / ms, batch_size / self.batch_sizes[edge]), 1.0)
        return max(outside / ms, 1.0)

    def _settle(self, rows: Iterable[int]) -> None:
        """Make monotone what changed in these rows; where neighbours disagree, the better known one counts more."""
        for row in rows:
            cells = self._cells[row]
            if cells == sorted(cells):
                self._by_width[row] = cells[:]
            else:
                self._by_width[row] = grid.isotonic(cells, [1 / variance for variance in self._variance[row]])
        columns = list(zip(*self._by_width, strict=True))
        if any(list(column) != sorted(column) for column in columns):
            weights = [[1 / variance for variance in column] for column in zip(*self._variance, strict=True)]
            columns = [tuple(grid.isotonic(*pair)) for pair in zip(columns, weights, strict=True)]
        self._table = list(zip(*columns, strict=True))

    def _refit(self) -> None:
        """Without calibration: the plane through the measured cells is what the others are taken from."""
        known = {
            (batch_size, width): cell
            for batch_size, cells, visits in zip(self.batch_sizes, self._cells, self._visits, strict=True)
            for width, cell, visited in zip(self.widths, cells, visits, strict=True)
            if visited
        }
        self._base = grid.complete({}, self.batch_sizes, self.widths, grid.line(known))
        for row, cells in enumerate(self._cells):
            for column, visited in enumerate(self._visits[row]):
                base = self._base[row][column]
                if visited:
                    self._correction[row][column] = log(cells[column] / base)
                else:
                    self._correction[row][column], cells[column] = 0.0, base
        self._settle(range(len(self.batch_sizes)))

    def __str__(self) -> str:
        rows = ((size, " ".join(f"{ms:.1f}" for ms in self.row(size))) for size in self.batch_sizes)
        return "ms a step by width, " + ", ".join(f"batch size {size}: {row}" for size, row in rows)

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON; ``from_dict`` reads it back as a calibrated table of what is known now."""
        return {
            "widths": list(self.widths),
            "batch_sizes": list(self.batch_sizes),
            "milliseconds": [[round(ms, 4) for ms in self.row(batch_size)] for batch_size in self.batch_sizes],
            "per_token": self.per_token,
            "calibrated": bool(self.points),
            "drift": round(self._scale, 4),
            "measured": self.measured,
            "visits": [list(row) for row in self._visits],
        }

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> CostTable:
        """The table that ``as_dict`` described, as its calibration."""
        points = {
            (batch_size, width): ms
            for batch_size, row in zip(table["batch_sizes"], table["milliseconds"], strict=True)
            for width, ms in zip(table["widths"], row, strict=True)
        }
        return cls(table["widths"], points, table["per_token"])
