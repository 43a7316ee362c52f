"""How measured step times differ from their table: the machine's drift, what its table leaves out, single cells.

    ms = table * exp(correction) * exp(drift) + constant + per_request * batch_size + per_token * context

A Kalman filter on the logarithm of ``ms``. How an error is shared follows from how well each unknown is known: the
first measurement of a cell corrects the cell, an error in a well-known cell moves the machine, one that goes with the
batch size or the context moves their slopes. An error counts for at most ``OUTLIER`` standard deviations of what was
expected.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import exp, log, sqrt
from operator import mul

NOISE = 0.1**2
"""Variance of a measured step. All variances of the machine and of cells are those of logarithms."""
DRIFT_STEP, CELL_STEP = 1.5e-4, 4e-6
"""Variance that a step adds: the machine's drift follows within some 20 steps, a cell within some 100 of its own."""
DRIFT, CELL = {True: 0.2**2, False: 0.5**2}, {True: 0.15**2, False: 0.3**2}
"""Variance before any measurement: of the drift and of a cell, with and without calibration."""
OUTLIER = 3.0
OUTSIDE_A_FORWARD = 0.5, 0.05
"""Shares of a plain step, give or take, that a calibration may miss: in every step, and for each request."""
CONSTANT_STEP = 1e-4
"""What a step adds to the first's variance, as a share of it."""
DOUBLING_CONTEXT = 32768
"""Context at which ``per_token`` is first thought to double a plain step, give or take all of it."""
LEAST_SHARE = 0.3
"""A step takes at least this share of what its table says: queued steps hide what a calibration waits for."""


class Tracker:
    """The filter's state.

    Args:
        rows, columns: of the table.
        calibrated: whether the table was measured: forwards alone, without what the scheduler adds. A guessed one has
            no such parts to tell apart.
        plain: milliseconds of the table's cheapest cell.
        per_token: milliseconds per token of context.
    """

    def __init__(self, rows: int, columns: int, calibrated: bool, plain: float, per_token: float) -> None:
        self.scale = 1.0  # exp(drift)
        self.correction = [[0.0] * columns for _ in range(rows)]
        self.variance = [[CELL[calibrated]] * columns for _ in range(rows)]
        # drift, and milliseconds: constant, per request, per token of context; a cell's error is independent of theirs.
        self._known = [0.0, 0.0, 0.0, per_token]
        constant, per_request = (calibrated * share * plain for share in OUTSIDE_A_FORWARD)
        spread = (DRIFT[calibrated], constant**2, per_request**2, (plain / DOUBLING_CONTEXT) ** 2)
        self._constant_step = CONSTANT_STEP * spread[1]
        self._covariance = [[spread[i] if i == j else 0.0 for j in range(4)] for i in range(4)]

    @property
    def per_token(self) -> float:
        return self._known[3]

    @property
    def outside(self) -> tuple[float, float]:
        """Milliseconds of every step, and for each request, that the table leaves out."""
        return self._known[1], self._known[2]

    def milliseconds(self, table: Iterable[float], batch_size: int, context: int) -> list[float]:
        """Of steps for which the table, corrections included, says these milliseconds."""
        scale, (_, constant, per_request, per_token) = self.scale, self._known
        outside, read = constant + per_request * batch_size, per_token * context
        if outside >= 0:
            return [ms * scale + outside + read for ms in table]
        return [max(ms * scale + outside, LEAST_SHARE * ms * scale) + read for ms in table]

    def start(self, ratio: float) -> None:
        """The first step on an unknown machine took ``ratio`` times what an arbitrary table says."""
        self._known[0], self.scale = log(ratio), ratio
        self._covariance[3][3] *= ratio * ratio

    def learn(
        self, row: int, share: float, column: int, table_ms: float, batch_size: int, context: int, milliseconds: float
    ) -> None:
        """Take note of a measured step, ``share`` of the way from this row to the next.

        Args:
            table_ms: what the table says, corrections included.
        """
        (expected,) = self.milliseconds((table_ms,), batch_size, context)
        # Slopes of the logarithm over each unknown.
        own = table_ms * self.scale / expected
        over_first, over_second = own * (1 - share), own * share
        slopes = (own, 1 / expected, batch_size / expected, context / expected)
        first, second, covariance = self.variance[row], self.variance[row + 1], self._covariance
        covariance[0][0] += DRIFT_STEP
        covariance[1][1] += self._constant_step
        # Covariance of each unknown with the measurement's error.
        of_known = [_dot(line, slopes) for line in covariance]
        of_first, of_second = over_first * first[column], over_second * second[column]
        known = _dot(of_known, slopes)
        total = known + over_first * of_first + over_second * of_second + NOISE
        most = OUTLIER * sqrt(total)
        gain = min(max(log(milliseconds / expected), -most), most) / total
        for i, of_one in enumerate(of_known):
            self._known[i] += of_one * gain
            line, part = covariance[i], of_one / total
            for j, of_other in enumerate(of_known):
                line[j] -= part * of_other
        self._known[2:] = [max(slope, 0.0) for slope in self._known[2:]]  # more work never takes less time
        self.scale = exp(self._known[0])
        self.correction[row][column] += of_first * gain
        self.correction[row + 1][column] += of_second * gain
        first[column] += (1 - share) * CELL_STEP - of_first * of_first / total
        second[column] += share * CELL_STEP - of_second * of_second / total


def _dot(left: Iterable[float], right: Iterable[float]) -> float:
    return sum(map(mul, left, right))
