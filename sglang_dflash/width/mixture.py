"""Expected tokens of a batch in which some rows verify copies: each kind of row has a survival of its own.

A copy that begins right mostly goes on right, which tells nothing about the drafter's next block, and the other way
round: one survival of both kinds would be wrong for each. A batch is the mixture of them. What is known before a step
is the share of rows with a match, one step late. The drafter may overrule a match, and a match may have come or gone
since, so the share of copied rows among those that matched is learned too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_dflash.width.survival import Survival

COPY_PRIOR = 0.9
"""Hazard of a copied token before any observation."""
TAKEN_PRIOR, TAKEN_TRIES, TAKEN_MEMORY = 0.7, 4.0, 32.0
"""Share of matches that are verified as copies: before any observation, that guess's weight in rows, and the steps with
a match after which a row has faded to 1/e."""
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
        self._matched, self._taken = TAKEN_TRIES, TAKEN_TRIES * TAKEN_PRIOR
        self.of_drafts, self._of_copies = self._tokens(self.drafted, block), self._tokens(self.copied, widths[-1])

    @property
    def taken(self) -> float:
        """Share of the rows with a match, as known one step late, that verify a copy."""
        return min(self._taken / self._matched, 1.0)

    @property
    def copies_are_old(self) -> bool:
        return self.copied.evidence_of_first < OLD

    def tokens(self, matching: float) -> list[float]:
        """Expected tokens of a row by width, if this share of the rows has a match."""
        if not matching:
            return self.of_drafts
        share = matching * self.taken
        rest = 1 - share
        return [rest * drafts + share * copy for drafts, copy in zip(self.of_drafts, self._of_copies, strict=True)]

    def launched(self, matching: float) -> None:
        """A step that may copy was launched with so many rows that had a match, of which some will be copied."""
        keep = 1 - 1 / TAKEN_MEMORY
        self._matched = self._matched * keep + matching
        self._taken *= keep

    def observe(self, width: int, accept_lens: Sequence[int], copied: Sequence[bool]) -> None:
        """Count a finished step; arguments as in :meth:`WidthPolicy.observe`."""
        drafts, block = accept_lens, self._block
        if True in copied:
            copies = [length for length, copy in zip(accept_lens, copied, strict=True) if copy]
            drafts = [length for length, copy in zip(accept_lens, copied, strict=True) if not copy]
            self._taken += len(copies)
            self.copied.observe(width, copies)
            self._of_copies = self._tokens(self.copied, self._widths[-1])
        else:
            self.copied.observe(1, ())  # evidence ages
        if width > block:  # what passed beyond the block was luck
            width, drafts = block, [min(length, block) for length in drafts]
        if drafts:
            self.drafted.observe(width, drafts)
            self.of_drafts = self._tokens(self.drafted, block)

    def fingerprint(self) -> tuple[float, ...]:
        return (*self.of_drafts, *self._of_copies, self._matched, self._taken)

    def as_dict(self) -> dict[str, Any]:
        """The part of ``/server_info``: the drafts' survival, and under ``copies`` that of copied rows."""
        return {
            "survival": self.drafted.as_dict(),
            "copies": {"taken": round(self.taken, 4), "survival": self.copied.as_dict()},
        }

    def _tokens(self, survival: Survival, widest: int) -> list[float]:
        return [survival.expected_tokens(min(width, widest)) for width in self._widths]
