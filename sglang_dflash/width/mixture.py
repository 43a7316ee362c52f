"""Expected tokens of a batch in which some rows have something to copy: each kind of row has a survival of its own.

A copy that begins right mostly goes on right, which tells nothing about the drafter's next block, and the other way
round: one survival of both would be wrong for each. A row counts as matched by what the host had heard of it when it
chose the width. So the survival of matched rows includes what has changed since, and the copies that the drafter
overrules.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from operator import not_

from sglang_dflash.width.survival import Survival

MATCHED_PRIOR = 0.9
"""Hazard of a matched row before any observation."""
OLD = 4.0
"""Blocks of matched rows that have not faded, below which their survival is hardly known."""


class Mixture:
    """Survival of unmatched and of matched rows.

    Args:
        widths: ascending.
        drafted: positions that the drafter drafts at most. Beyond them an unmatched row has nothing to verify.
    """

    def __init__(self, widths: Sequence[int], drafted: int) -> None:
        self._widths, self._drafted = widths, drafted
        self.unmatched, self.matched = Survival(drafted), Survival(widths[-1], MATCHED_PRIOR)
        self.of_unmatched, self._of_matched = self._tokens(self.unmatched), self._tokens(self.matched)

    @property
    def is_old(self) -> bool:
        """Whether what is known of matched rows has faded."""
        return self.matched.evidence_of_first < OLD

    def tokens(self, matching: float) -> list[float]:
        """Expected tokens of a row by width, if this share of the rows is matched."""
        if not matching:
            return self.of_unmatched
        rest = 1 - matching
        return [
            rest * ours + matching * theirs for ours, theirs in zip(self.of_unmatched, self._of_matched, strict=True)
        ]

    def observe(self, width: int, accept_lens: Sequence[int], matched: Sequence[bool]) -> None:
        """Count a finished step; arguments as in :meth:`WidthPolicy.observe`."""
        if True in matched:
            self.matched.observe(width, list(compress(accept_lens, matched)))
            accept_lens = list(compress(accept_lens, map(not_, matched)))
            self._of_matched = self._tokens(self.matched)
        else:
            self.matched.observe(1, ())  # its evidence ages
        if width > self._drafted:  # beyond: by chance, or copies of a match that the host had not heard of
            width, accept_lens = self._drafted, [min(length, self._drafted) for length in accept_lens]
        self.unmatched.observe(width if accept_lens else 1, accept_lens)
        self.of_unmatched = self._tokens(self.unmatched)

    def _tokens(self, survival: Survival) -> list[float]:
        return [survival.tokens[min(width, survival.max_width)] for width in self._widths]
