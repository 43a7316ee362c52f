"""Has traffic changed, and since when? A one-sided CUSUM over the steps' commits."""

from __future__ import annotations

from typing import Any

TILT = 1.5
"""Size of the changes looked for, in units of log odds of a draft's acceptance: from 0.5 to 0.8, say."""
CERTAIN = 7.0
"""Log-likelihood ratio that makes a change certain: one false alarm in some thousand steps."""


class Change:
    """Page's test: the log-likelihood ratio of a change against none, restarted whenever it favours none.

    With hazards h and s commits more than expected, it grows by ``TILT * s - TILT**2 / 2 * sum h (1 - h)``, to second
    order. Its last restart is the likeliest moment of the change.
    """

    def __init__(self, before: Any) -> None:
        self.score = 0.0
        self.rose = False
        self.before = before
        """What was known at the last restart; the owner replaces it after a step that leaves the score at 0."""

    def is_certain(self, surplus: float, variance: float) -> bool:
        """Add a step.

        Args:
            surplus: commits in excess of the expected ones, in the direction looked for.
            variance: what the expected ones leave to chance.
        """
        step = TILT * surplus - TILT * TILT / 2 * variance
        self.rose = step > 0
        self.score = max(self.score + step, 0.0)
        return self.score > CERTAIN
