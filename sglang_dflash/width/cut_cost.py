"""What a cut inside a batch saves, and what it costs: not every position that is left out makes a step shorter."""

from __future__ import annotations

from math import ceil, inf
from typing import NamedTuple


class CutCost(NamedTuple):
    """Of a batch size.

    Attributes:
        overhead: milliseconds that a step with any cut takes more.
        per_token: milliseconds that it takes less for each position left out.
    """

    overhead: float
    per_token: float

    @classmethod
    def of_steps(cls, whole: float, some: tuple[int, float], most: tuple[int, float]) -> CutCost:
        """From the milliseconds of a whole block's step, and two (positions left out, milliseconds) of it cut."""
        (few, few_ms), (many, many_ms) = some, most
        per_token = max((few_ms - many_ms) / (many - few), 0.0)
        return cls(max(many_ms + per_token * many - whole, 0.0), per_token)

    @property
    def least(self) -> float:
        """Positions that must be left out for a cut to save anything."""
        return ceil(self.overhead / self.per_token) if self.per_token else inf
