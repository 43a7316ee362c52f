"""What a step cost in a recording, by batch size and width, and what a prefill.

The policy's own cost table (:mod:`sglang_dflash.width.cost`) is not used here: a simulator that shared it would share
its errors, and could not show them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import fmean, median

import numpy as np

from sglang_dflash.bench.step_log import Prefill, Step
from sglang_dflash.errors import DFlashError

_FEWEST = 5  # measured steps of a cell
_OUTLIER = 4.0  # times the cell's median
_Plane = tuple[float, float, float, float]


@dataclass(frozen=True)
class StepCosts:
    """Milliseconds of a decode step and of a prefill.

    A plane with a twist, a + b n + c w + d n w for n requests and width w, is laid through all measured steps; where a
    pair of n and w was measured often enough, it is corrected to the mean there. Between these the correction is linear
    in n.

    Attributes:
        plane: (a, b, c, d), at context 0.
        floor: no step takes less, whatever the plane says.
        corrections: by width, the well measured batch sizes in ascending order with their mean over the plane's.
        per_token: milliseconds for each committed token of the batch.
        noise: measured over expected milliseconds of the recorded steps; their mean is 1.
        prefill: milliseconds of a prefill without tokens, and for each token that it computes.
    """

    plane: _Plane
    floor: float
    corrections: dict[int, tuple[list[int], list[float]]]
    per_token: float
    noise: list[float]
    prefill: tuple[float, float]

    @property
    def widths(self) -> list[int]:
        return sorted(self.corrections)

    def step_ms(self, batch_size: int, width: int, context: int) -> float:
        """Of a step.

        Raises:
            DFlashError: a width, or a batch larger than any, that was not recorded: nothing is extrapolated upwards.
        """
        if width not in self.corrections:
            raise DFlashError(
                f"width {width}", expected=f"a recorded one: {self.widths}", remedy="record it with the others"
            )
        sizes, ratios = self.corrections[width]
        if batch_size > sizes[-1]:
            raise DFlashError(
                f"a batch of {batch_size} at width {width}",
                expected=f"at most {sizes[-1]}, the largest with {_FEWEST} measured steps",
                remedy="record at this concurrency, or for longer",
            )
        ratio = float(np.interp(batch_size, sizes, ratios))
        return ratio * _on(self.plane, batch_size, width, self.floor) + self.per_token * context

    def prefill_ms(self, tokens: float) -> float:
        fixed, each = self.prefill
        return fixed + each * tokens


def step_costs(steps: Sequence[Step]) -> StepCosts:
    """Costs of the measured steps of a log.

    Raises:
        DFlashError: too few measured steps.
    """
    measured: dict[tuple[int, int], list[tuple[float, float]]] = {}
    prefills: list[tuple[float, float]] = []
    for step, following in zip_longest(steps, steps[1:]):
        ms = step.ms
        if isinstance(step, Prefill):
            # Mostly without a time of its own; a batch that was prefilled goes on at once
            ms = 1000 * (following.at - step.at) if ms is None and following else ms
            if ms is not None:
                prefills.append((step.tokens, ms))
        elif ms is not None:
            measured.setdefault((step.width, len(step.rids)), []).append((step.context, ms))
    groups = {cell: np.array(_without_outliers(rows)) for cell, rows in sorted(measured.items())}
    often = {cell: rows for cell, rows in groups.items() if len(rows) >= _FEWEST}
    if not often or not prefills:
        raise DFlashError(
            f"{len(prefills)} measured prefills, {len(often)} (width, batch size) with {_FEWEST} measured steps",
            expected="some of both",
            remedy="record for longer, without other load",
        )
    per_token = _common_slope(groups.values())
    means = {cell: float(np.mean(rows[:, 1] - per_token * rows[:, 0])) for cell, rows in groups.items()}
    plane = _plane(means, {cell: len(rows) for cell, rows in groups.items()})
    floor = min(means.values()) / 2
    corrections: dict[int, tuple[list[int], list[float]]] = {}
    noise: list[float] = []
    for (width, batch_size), rows in often.items():
        mean = means[width, batch_size]
        sizes, ratios = corrections.setdefault(width, ([], []))
        sizes.append(batch_size)
        ratios.append(mean / _on(plane, batch_size, width, floor))
        noise += (rows[:, 1] / (mean + per_token * rows[:, 0])).tolist()
    average = fmean(noise)
    return StepCosts(plane, floor, corrections, per_token, [ratio / average for ratio in noise], _line(prefills))


def _on(plane: _Plane, batch_size: int, width: int, floor: float) -> float:
    a, b, c, d = plane
    return max(floor, a + b * batch_size + c * width + d * batch_size * width)


def _plane(means: Mapping[tuple[int, int], float], counts: Mapping[tuple[int, int], int]) -> _Plane:
    """Least squares of relative errors, every step counted once."""
    terms = np.array([(1, size, width, size * width) for width, size in means], dtype=float)
    ms = np.array(list(means.values()))
    weight = np.sqrt([counts[cell] for cell in means]) / ms
    a, b, c, d = np.linalg.lstsq(terms * weight[:, None], ms * weight, rcond=None)[0]
    return float(a), float(b), float(c), float(d)


def _without_outliers(rows: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Pauses of the machine that no width caused are left out."""
    limit = _OUTLIER * median(ms for _, ms in rows)
    return [(context, ms) for context, ms in rows if ms <= limit]


def _common_slope(groups: Iterable[np.ndarray]) -> float:
    """Milliseconds per token of context that explains most within all cells; 0 where it would be negative."""
    products = squares = 0.0
    for rows in groups:
        context, ms = (rows - rows.mean(axis=0)).T
        products += float(context @ ms)
        squares += float(context @ context)
    return max(0.0, products / squares) if squares else 0.0


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Least squares, neither term negative."""
    tokens, ms = np.array(_without_outliers(points)).T
    if np.ptp(tokens) == 0:
        return float(ms.mean()), 0.0
    each, fixed = np.polyfit(tokens, ms, 1)
    if each < 0:
        return float(ms.mean()), 0.0
    if fixed < 0:
        return 0.0, float(tokens @ ms / (tokens @ tokens))
    return float(fixed), float(each)
