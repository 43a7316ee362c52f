"""Circuit breaker: plain decoding has been the fastest for a while, and somebody should be told why."""

from __future__ import annotations

from dataclasses import dataclass

PATIENCE = 32
"""Decisions in a row for width 1 before it is called a pause."""

ADVICE = (
    "compare the chat template and the thinking switch with the drafter's card",
    "try another drafter",
)
"""What usually helps a drafter that is accepted less than its card says."""


@dataclass(frozen=True)
class Pause:
    """Why the drafter rests.

    Args:
        width: the narrowest block that drafts.
        first_accepted: share of first drafts that the target accepts, 0 to 1.
        tokens: tokens that a step of that width is expected to commit for each request.
        cost: milliseconds of such a step over those of plain decoding, at the batch size of the decision.
    """

    width: int
    first_accepted: float
    tokens: float
    cost: float

    def __str__(self) -> str:
        return (
            f"drafting rests: a block of {self.width} brings {self.tokens:.2f} tokens in {self.cost:.2f} times the "
            f"time of plain decoding ({self.first_accepted:.0%} of first drafts accepted). "
            f"What may help: {'; '.join(ADVICE)}"
        )


class Breaker:
    """Counts decisions for plain decoding; any other one ends the pause."""

    def __init__(self) -> None:
        self._plain_in_a_row = 0
        self.pauses = 0
        self.pause: Pause | None = None

    def drafting(self) -> None:
        self._plain_in_a_row = 0
        self.pause = None

    def plain(self) -> bool:
        """-> whether a pause begins with this decision; the caller then fills in ``pause``."""
        self._plain_in_a_row += 1
        return self._plain_in_a_row == PATIENCE

    def begin(self, pause: Pause) -> None:
        self.pause = pause
        self.pauses += 1
