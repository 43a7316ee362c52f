"""Expected tokens of a batch in which some rows verify copies: each kind of row has a survival of its own.

A copy that begins right mostly goes on right, which tells nothing about the drafter's next block, and the other way
round: one survival of both kinds would be wrong for each. What is known before a step is the share of rows that had a
match one step earlier. Since then matches have come and gone, and the drafter may overrule one; so the share of copied
rows is learned, both among rows that had a match and among the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from sglang_dflash.width.survival import Survival

COPY_PRIOR = 0.9
"""Hazard of a copied token before any observation."""
TAKEN_PRIOR, PRIOR_ROWS = 0.7, 4.0
"""Share of matches that are copied before any observation, and that guess's weight in rows."""
LEAST_COME = 0.05
"""Share of rows without a match that may have found one since, for telling which rows of a batch were copied."""
MEMORY = 32.0
"""Rounds of its kind after which a row's evidence has faded to 1/e."""
OLD = 4.0
"""Copied blocks that have not faded, below which the survival of copies is hardly known."""


class Mixture:
    """Survival of drafted and of copied rows, and the share of the latter.

    Args:
        widths: ascending.
        block: widest block of the drafter. Beyond it a row that is not copied has nothing to verify.
    """

    def __init__(self, widths: Sequence[int], block: int) -> None:
        self._widths, self._block = widths, block
        self.drafted, self.copied = Survival(block), Survival(widths[-1], COPY_PRIOR)
        self.of_drafts, self._of_copies = self._tokens(self.drafted, block), self._tokens(self.copied, widths[-1])
        self._heard: deque[float] = deque()  # by steps that are not observed yet: share of rows with a match
        # Rows, and copied ones of them: with a match one step earlier, and without.
        self._matched, self._taken = PRIOR_ROWS, PRIOR_ROWS * TAKEN_PRIOR
        self._unmatched, self._came = PRIOR_ROWS, 0.0

    def share(self, matching: float) -> float:
        """Expected share of copied rows, if this share of the rows had a match one step ago."""
        return matching * self._taken / self._matched + (1 - matching) * self._came / self._unmatched

    @property
    def copies_are_old(self) -> bool:
        return self.copied.evidence_of_first < OLD

    def tokens(self, share: float) -> list[float]:
        """Expected tokens of a row by width, if this share of the rows is copied."""
        if not share:
            return self.of_drafts
        rest = 1 - share
        return [rest * drafts + share * copy for drafts, copy in zip(self.of_drafts, self._of_copies, strict=True)]

    def launched(self, matching: float) -> None:
        """A step was launched when this share of its rows was known to match."""
        self._heard.append(matching)

    def observe(self, width: int, accept_lens: Sequence[int], copied: Sequence[bool]) -> None:
        """Count a finished step; arguments as in :meth:`WidthPolicy.observe`."""
        matching = self._heard.popleft() if self._heard else 0.0
        self._count(matching, len(accept_lens), sum(copied), width > 1)
        drafts, block = accept_lens, self._block
        if True in copied:
            copies = [length for length, copy in zip(accept_lens, copied, strict=True) if copy]
            drafts = [length for length, copy in zip(accept_lens, copied, strict=True) if not copy]
            self.copied.observe(width, copies)
            self._of_copies = self._tokens(self.copied, self._widths[-1])
        else:
            self.copied.observe(1, ())  # evidence ages
        if width > block:  # what passed beyond the block was luck
            width, drafts = block, [min(length, block) for length in drafts]
        if drafts:
            self.drafted.observe(width, drafts)
            self.of_drafts = self._tokens(self.drafted, block)

    def _count(self, matching: float, rows: int, copied: float, drafted: bool) -> None:
        """Count copied rows, and guess by the known shares which of them had a match."""
        if drafted and matching:
            taken = matching * self._taken / self._matched
            came = (1 - matching) * max(self._came / self._unmatched, LEAST_COME)
            of_matches = min(copied * taken / (taken + came), matching * rows)
            keep = 1 - matching / MEMORY
            self._matched = self._matched * keep + matching * rows
            self._taken = self._taken * keep + of_matches
            copied -= of_matches
        if self._came or copied:  # a plain step copies nothing, so a share from before it fades
            keep = 1 - (1 - matching) / MEMORY
            self._unmatched = self._unmatched * keep + (1 - matching) * rows
            self._came = min(self._came * keep + copied, self._unmatched)

    def fingerprint(self) -> tuple[float, ...]:
        return (*self.of_drafts, *self._of_copies, self.share(1.0), self.share(0.0))

    def as_dict(self) -> dict[str, Any]:
        """The part of ``/server_info``: the drafts' survival, and of copies theirs and the shares of rows."""
        shares = {"taken": round(self.share(1.0), 4), "came": round(self.share(0.0), 4)}
        return {"survival": self.drafted.as_dict(), "copies": {**shares, "survival": self.copied.as_dict()}}

    def _tokens(self, survival: Survival, widest: int) -> list[float]:
        return [survival.expected_tokens(min(width, widest)) for width in self._widths]
