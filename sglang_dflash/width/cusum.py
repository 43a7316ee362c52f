"""One-sided CUSUM test for a change of the drafts' acceptance, and the moment of the change (Page, 1954)."""

from __future__ import annotations

from typing import Generic, TypeVar

TILT = 1.5
"""Size of the change to detect, in log odds of a draft's acceptance: from 0.5 to 0.8, say."""
CERTAIN = 7.0
"""Log-likelihood ratio at which a change counts as certain: about one false alarm in some thousand steps."""

State = TypeVar("State")


class Cusum(Generic[State]):
    """Cumulative log-likelihood ratio of a change against none, restarted at 0 whenever it favours none.

    A step in which s more drafts are committed than expected adds, to second order, ``TILT * s - TILT**2 / 2 * v``,
    where v is the variance of s. The last restart is the likeliest moment of the change.

    Attributes:
        score: the log-likelihood ratio, at least 0.
        rose: whether the last step raised it.
        before: the caller's state at the last restart; the caller replaces it while ``score`` is 0.
    """

    def __init__(self, before: State) -> None:
        self.score, self.rose, self.before = 0.0, False, before

    def is_certain(self, surplus: float, variance: float) -> bool:
        """Add a step and return whether a change is certain.

        Args:
            surplus: commits beyond the expected ones, in the direction to detect.
            variance: of the surplus, if nothing has changed.
        """
        step = TILT * surplus - TILT * TILT / 2 * variance
        self.rose = step > 0
        self.score = max(self.score + step, 0.0)
        return self.score > CERTAIN
