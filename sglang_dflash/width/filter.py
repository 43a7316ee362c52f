"""Kalman filter on the logarithm of step times: what the calibrated table gets wrong or leaves out.

    ms = table * exp(correction + drift) + constant + per_request * batch_size + per_token * context

The state x is (drift, constant, per_request, per_token) and one correction for each cell of the table. It follows a
random walk; a step between two rows of the table observes y = log ms with noise of variance R and, linearised, the row
vector H = d log(ms) / dx. With the covariance P and what a step adds to it, Q (Kalman, 1960):

    P <- P + Q,   S = H P H' + R,   K = P H' / S,   x <- x + K (y - log ms(x)),   P <- P - K H P

So an error is shared by how well each unknown is known: the first measurement of a cell corrects the cell, an error in
a well-known cell moves the drift, and one that goes with the batch size or the context moves their slopes. Two
departures: the innovation y - log ms(x) counts for at most ``OUTLIER`` standard deviations, and a correction's
covariance with all other unknowns is taken as 0, so P is a 4 x 4 matrix and a variance for each cell. Plain Python: for
so few unknowns numpy takes longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import exp, log, sqrt
from operator import mul

NOISE = 0.1**2
"""R. Variances of the drift and of corrections are those of logarithms too."""
DRIFT_STEP, CELL_STEP = 1.5e-4, 4e-6
"""Q of the drift, which adapts within some 20 steps, and of a correction, within some 100 steps of its cell."""
DRIFT, CELL = {True: 0.2**2, False: 0.5**2}, {True: 0.15**2, False: 0.3**2}
"""P of the drift and of a correction at the start, with and without calibration."""
OUTLIER = 3.0
OUTSIDE_A_FORWARD = 0.5, 0.05
"""Standard deviations of ``constant`` and ``per_request`` at the start, as shares of a plain step."""
CONSTANT_STEP = 1e-4
"""Q of ``constant``, as a share of its variance at the start."""
DOUBLING_CONTEXT = 32768
"""Context at which ``per_token``, one standard deviation above 0 at the start, would double a plain step."""
LEAST_SHARE = 0.3
"""A step takes at least this share of its table's time: queued steps hide latency that a calibration waits for."""


class StepTimeFilter:
    """The filter's state.

    Args:
        rows, columns: size of the table.
        calibrated: whether the table was measured, as forwards without the scheduler's part. A guessed one has no such
            parts to tell apart.
        plain: milliseconds of the table's cheapest cell.
    """

    def __init__(self, rows: int, columns: int, calibrated: bool, plain: float) -> None:
        self.scale = 1.0  # exp(drift)
        self.correction = [[0.0] * columns for _ in range(rows)]
        self.variance = [[CELL[calibrated]] * columns for _ in range(rows)]  # of the corrections
        self._x = [0.0, 0.0, 0.0, 0.0]  # drift; milliseconds: constant, per request, per token of context
        constant, per_request = (calibrated * share * plain for share in OUTSIDE_A_FORWARD)
        spread = (DRIFT[calibrated], constant**2, per_request**2, (plain / DOUBLING_CONTEXT) ** 2)
        self._constant_step = CONSTANT_STEP * spread[1]
        self._covariance = [[spread[i] if i == j else 0.0 for j in range(4)] for i in range(4)]

    @property
    def per_token(self) -> float:
        """Milliseconds per token of context."""
        return self._x[3]

    @property
    def outside(self) -> tuple[float, float]:
        """Milliseconds that the table leaves out: per step, and per request."""
        return self._x[1], self._x[2]

    def milliseconds(self, table: Iterable[float], batch_size: int, context: int) -> list[float]:
        """Predict step times from table entries that include their corrections."""
        scale, (_, constant, per_request, per_token) = self.scale, self._x
        outside, read = constant + per_request * batch_size, per_token * context
        if outside >= 0:
            return [ms * scale + outside + read for ms in table]
        return [max(ms * scale + outside, LEAST_SHARE * ms * scale) + read for ms in table]

    def start(self, ratio: float) -> None:
        """Set the scale of a guessed table: the first step took ``ratio`` times what it says."""
        self._x[0], self.scale = log(ratio), ratio
        self._covariance[3][3] *= ratio * ratio

    def learn(
        self,
        cells: Sequence[tuple[int, float]],
        column: int,
        table_ms: float,
        batch_size: int,
        context: int,
        milliseconds: float,
    ) -> None:
        """Update the state with a measured step.

        Args:
            cells: the table's rows that the step lies between, each with its share of ``table_ms``.
            table_ms: the table's entry, corrections included.
        """
        x, p = self._x, self._covariance
        p[0][0] += DRIFT_STEP
        p[1][1] += self._constant_step
        (expected,) = self.milliseconds((table_ms,), batch_size, context)
        forward = table_ms * self.scale / expected
        h = (forward, 1 / expected, batch_size / expected, context / expected)
        ph = [sum(map(mul, line, h)) for line in p]
        s = sum(map(mul, ph, h)) + NOISE
        of_cells = []
        for row, share in cells:
            ph_cell = share * forward * self.variance[row][column]
            s += share * forward * ph_cell
            of_cells.append((row, share, ph_cell))
        most = OUTLIER * sqrt(s)
        innovation = min(max(log(milliseconds / expected), -most), most)
        for i, ph_i in enumerate(ph):
            k, line = ph_i / s, p[i]
            x[i] += k * innovation
            for j, ph_j in enumerate(ph):
                line[j] -= k * ph_j
        x[2:] = [max(slope, 0.0) for slope in x[2:]]  # more work never takes less time
        self.scale = exp(x[0])
        for row, share, ph_cell in of_cells:
            k = ph_cell / s
            self.correction[row][column] += k * innovation
            self.variance[row][column] += share * CELL_STEP - k * ph_cell
