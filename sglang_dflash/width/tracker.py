"""How measured step times differ from their table: one machine's drift, one slope over context, a correction per cell.

A Kalman filter on the logarithm. How an error is shared follows from how well each of the three is known: the first
measurement of a cell corrects the cell, an error in a well-known cell moves the machine, and one that goes with the
context moves the slope. An error counts for at most ``OUTLIER`` standard deviations of what was expected.
"""

from __future__ import annotations

from math import exp, log, sqrt

NOISE = 0.1**2
"""Variance of a measured step. All variances are those of logarithms."""
DRIFT_STEP, CELL_STEP = 1.5e-4, 4e-6
"""Variance that a step adds: the machine's drift follows within some 20 steps, a cell within some 100 of its own."""
DRIFT, CALIBRATED, GUESSED = 0.5**2, 0.15**2, 0.3**2
"""Variance before any measurement: of the drift, and of a cell with and without calibration."""
OUTLIER = 3.0
DOUBLING_CONTEXT = 32768
"""Context at which ``per_token`` is first thought to double a plain step, give or take all of it."""


class Tracker:
    """The filter's state.

    Args:
        rows, columns: of the table.
        calibrated: whether the table was measured.
        plain: milliseconds of the table's cheapest cell.
        per_token: milliseconds per token of context.
    """

    def __init__(self, rows: int, columns: int, calibrated: bool, plain: float, per_token: float) -> None:
        self.scale = 1.0  # exp(drift)
        self.per_token = per_token
        self.correction = [[0.0] * columns for _ in range(rows)]
        self.variance = [[CALIBRATED if calibrated else GUESSED] * columns for _ in range(rows)]
        # Covariance of drift and per_token; a cell's error is taken as independent of theirs.
        self._drift = 0.0
        self._drift_drift, self._drift_slope, self._slope_slope = DRIFT, 0.0, (plain / DOUBLING_CONTEXT) ** 2

    def start(self, ratio: float) -> None:
        """The first step on an unknown machine took ``ratio`` times what an arbitrary table says."""
        self._drift, self.scale = log(ratio), ratio
        self._slope_slope *= ratio * ratio

    def learn(self, row: int, share: float, column: int, table_ms: float, context: int, milliseconds: float) -> None:
        """Take note of a measured step, ``share`` of the way from this row to the next.

        Args:
            table_ms: what the table says, corrections included, drift and context not.
        """
        expected = table_ms * self.scale + self.per_token * context
        reach = context / expected  # of the logarithm, per millisecond per token
        first, second = self.variance[row], self.variance[row + 1]
        drift = self._drift_drift + DRIFT_STEP
        # Covariance of each unknown with the measurement's error.
        of_drift = drift + reach * self._drift_slope
        of_slope = self._drift_slope + reach * self._slope_slope
        of_first, of_second = (1 - share) * first[column], share * second[column]
        total = of_drift + reach * of_slope + (1 - share) * of_first + share * of_second + NOISE
        most = OUTLIER * sqrt(total)
        gain = min(max(log(milliseconds / expected), -most), most) / total
        self._drift += of_drift * gain
        self.scale = exp(self._drift)
        self.per_token = max(self.per_token + of_slope * gain, 0.0)
        self.correction[row][column] += of_first * gain
        self.correction[row + 1][column] += of_second * gain
        self._drift_drift = drift - of_drift * of_drift / total
        self._drift_slope -= of_drift * of_slope / total
        self._slope_slope -= of_slope * of_slope / total
        first[column] += (1 - share) * CELL_STEP - of_first * of_first / total
        second[column] += share * CELL_STEP - of_second * of_second / total
