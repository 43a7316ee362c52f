"""Milliseconds of a decode step by batch size and width: calibrated at start-up, corrected by measured steps.

    ms(batch, width, context) = base(batch, width) * exp(drift + correction(batch, width))
                                + constant + per_request * batch + per_token * context

``base`` is the calibrated grid, linear between its batch sizes and beyond them; without calibration it is a plane that
is refitted to the cells seen so far. ``drift`` is the whole machine getting slower or faster, ``correction`` where a
cell differs from its calibration. The others are the same for all widths: what the scheduler adds to a step and to each
request, which no calibration sees, and the K/V that a step reads.

They are learned by `width/tracker.py`; an outlier moves a settled table by some 5 %. What is read never falls
with batch size or width, whatever was measured.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from math import exp, inf, log, sqrt
from typing import Any

from sglang_dflash.width import grid
from sglang_dflash.width.cut_cost import CutCost
from sglang_dflash.width.tracker import Tracker

DOUBT = 1.5
"""Standard deviations by which an entry is doubted."""


class CostTable:
    """What a step costs.

    Args:
        widths: ascending.
        points: measured milliseconds by (batch size, width), at next to no context; may be empty.
        per_token: milliseconds per committed token of the batch.
        cuts: what cutting a block saves, by batch size; without any, what a narrower block would.
    """

    def __init__(
        self,
        widths: Sequence[int],
        points: grid.Points | None = None,
        per_token: float = 0.0,
        cuts: Mapping[int, CutCost] | None = None,
    ) -> None:
        self.widths = tuple(widths)
        self._cuts = dict(sorted((cuts or {}).items()))
        self.points = dict(points or {})
        self.measured = 0
        self.batch_sizes = grid.rows(self.points)
        self._base = grid.complete(self.points, self.batch_sizes, self.widths)
        n, m = len(self.batch_sizes), len(self.widths)
        self._tracker = Tracker(n, m, bool(self.points), self._base[0][0], per_token)
        self._visits = [[0] * m for _ in range(n)]
        self._cells = [list(row) for row in self._base]  # base with its correction
        self._by_width = [list(row) for row in self._base]  # the same, not falling with the width
        self._settle(range(n))  # makes `_table`, which does not fall with batch size either

    @property
    def per_token(self) -> float:
        """Milliseconds per committed token of the batch."""
        return self._tracker.per_token

    @classmethod
    def calibrated(
        cls,
        points: Mapping[tuple[int, int], float],
        widths: Sequence[int] | None = None,
        per_token: float = 0.0,
        cuts: Mapping[int, CutCost] | None = None,
    ) -> CostTable:
        """A table of measured milliseconds by (batch size, width); the widths default to those measured."""
        return cls(widths or sorted({width for _, width in points}), points, per_token, cuts)

    def row(self, batch_size: int, context: int = 0) -> list[float]:
        """-> milliseconds of a step, by width in the order of ``widths``."""
        return self._tracker.milliseconds(self._forwards(batch_size), batch_size, context)

    def shortest(self, batch_size: int, context: int = 0) -> list[float]:
        """-> milliseconds by width that a step may take at least, for all that is known: ``DOUBT`` deviations less."""
        low, part = self._between(batch_size)
        share, variance = min(max(part, 0.0), 1.0), self._tracker.variance
        forwards = (
            ms * exp(-DOUBT * sqrt((1 - share) * (1 - share) * below + share * share * above))
            for ms, below, above in zip(self._forwards(batch_size), variance[low], variance[low + 1], strict=True)
        )
        return self._tracker.milliseconds(forwards, batch_size, context)

    def milliseconds(self, batch_size: int, width: int, context: int = 0) -> float:
        """A step's time at any width, on the line through the two nearest widths of the table."""
        row = self.row(batch_size, context)
        return row[0] if len(row) == 1 else grid.along(list(zip(self.widths, row, strict=True)), width)

    def per_verified_token(self, batch_size: int, width: int) -> float:
        """Milliseconds that one more verified token of one request costs at this width.

        The slope over the next narrower widths that draft, since a cut makes the block narrower. Taken from the
        calibrated grid where there is one: steps measured under a cut verified fewer tokens than their width says.
        """
        drafting = [column for column, narrower in enumerate(self.widths) if narrower > 1]
        if len(drafting) < 2:
            return 0.0
        wide = max(bisect_right(self.widths, width) - 1, drafting[1])
        narrow = max(wide - 2, drafting[0])
        low, part = self._between(batch_size)
        source, share = (self._base if self.points else self._table), min(max(part, 0.0), 1.0)
        most, least = (source[low][c] + share * (source[low + 1][c] - source[low][c]) for c in (wide, narrow))
        requests = min(max(batch_size, self.batch_sizes[0]), self.batch_sizes[-1])
        slope = (most - least) / (self.widths[wide] - self.widths[narrow])
        return max(slope, 0.0) * self._tracker.scale / requests

    def cut(self, batch_size: int, width: int) -> CutCost:
        """What it saves to cut a block of this width; as measured at the nearest batch size, if it was."""
        if not self._cuts or batch_size == 1:  # one request alone: its block just gets narrower
            return CutCost(0.0, self.per_verified_token(batch_size, width))
        nearest = min(self._cuts, key=lambda size: abs(size - batch_size))
        overhead, per_token = self._cuts[nearest]
        return CutCost(overhead * self._tracker.scale, per_token * self._tracker.scale)

    def observe(self, batch_size: int, width: int, context: int, milliseconds: float, at_most: bool = False) -> None:
        """Learn from a measured step; a width that the table does not have is left out.

        Args:
            at_most: the step did more than its width asks for: it can only show that the table says too much.
        """
        if width not in self.widths or not 0 < milliseconds < inf:
            return
        column = self.widths.index(width)
        if at_most and milliseconds >= self.row(batch_size, context)[column]:
            return
        low, part = self._between(batch_size)
        share = min(max(part, 0.0), 1.0)
        lower, upper = self._cells[low], self._cells[low + 1]
        expected = lower[column] + share * (upper[column] - lower[column])
        if not 0 <= part <= 1:
            expected *= self._beyond(batch_size, low if part < 0 else low + 1, column, low, part)
        if not self.points and not self.measured:
            self._tracker.start(milliseconds / expected)
        self._tracker.learn(low, share, column, expected, batch_size, context, milliseconds)
        self.measured += 1
        row = low + (share >= 0.5)
        self._visits[row][column] += 1
        for near in (low, low + 1):
            self._cells[near][column] = self._base[near][column] * exp(self._tracker.correction[near][column])
        if not self.points and self._visits[row][column].bit_count() == 1:
            self._refit()
        else:
            self._settle((low, low + 1))

    def _forwards(self, batch_size: int) -> list[float]:
        """-> the table's own milliseconds by width."""
        low, part = self._between(batch_size)
        if 0 <= part <= 1:
            pairs = zip(self._table[low], self._table[low + 1], strict=True)
            row = [below + part * (above - below) for below, above in pairs]
        else:
            edge = low if part < 0 else low + 1
            row = [
                ms * self._beyond(batch_size, edge, column, low, part) for column, ms in enumerate(self._table[edge])
            ]
        return list(accumulate(row, max))

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
                self._by_width[row] = grid.isotonic(cells, [1 / variance for variance in self._tracker.variance[row]])
        columns = list(zip(*self._by_width, strict=True))
        if any(list(column) != sorted(column) for column in columns):
            weights = [[1 / variance for variance in column] for column in zip(*self._tracker.variance, strict=True)]
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
                    self._tracker.correction[row][column] = log(cells[column] / base)
                else:
                    self._tracker.correction[row][column], cells[column] = 0.0, base
        self._settle(range(len(self.batch_sizes)))

    def __str__(self) -> str:
        rows = ((size, " ".join(f"{ms:.1f}" for ms in self.row(size))) for size in self.batch_sizes)
        text = "ms a step by width, " + ", ".join(f"batch size {size}: {row}" for size, row in rows)
        if self._cuts:
            least = ", ".join(f"{size}: {cut.least}" for size, cut in self._cuts.items())
            text += f"; positions that a cut must leave out to pay, by batch size: {least}"
        return text

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON; ``from_dict`` reads it back as a calibrated table of what is known now."""
        return {
            "widths": list(self.widths),
            "batch_sizes": list(self.batch_sizes),
            "milliseconds": [[round(ms, 4) for ms in self.row(batch_size)] for batch_size in self.batch_sizes],
            "per_token": self.per_token,
            "cuts": {
                str(size): {"overhead": cut.overhead, "per_token": cut.per_token} for size, cut in self._cuts.items()
            },
            "calibrated": bool(self.points),
            "drift": round(self._tracker.scale, 4),
            "outside": [round(ms, 4) for ms in self._tracker.outside],
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
