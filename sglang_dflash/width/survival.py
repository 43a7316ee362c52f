"""How far into a block drafts survive: the chance of each position, learned from blocks of any width.

What is estimated is the hazard ``h_j``, j = 1 ... max_width - 1: P(draft j is committed | drafts 1 ... j-1 are). A
step of width w ends the observation of a request at its first rejection or at position w - 1, and says nothing of what
lies beyond; so a hazard is a ratio of counts, commits over tries, among the requests that came as far as j (Kaplan and
Meier's estimator, with counts that fade).

A position that a ragged cut leaves unverified counts as *not committed*. The cut takes the hopeless rows, so hazards
of the verified rows alone are too high to plan with; with the cut counted as an end, ``expected_tokens(w)`` is what a
block of width w commits under the cut in force. Hazards of verified rows alone are reported as
``accepted_if_verified``.

Evidence fades by the step, for every position, so that one which is no longer visited falls back to the hazard of the
position before it, and the first one to a prior. Plain steps bring no evidence and age it little. When traffic changes,
what was seen before the change is dropped at once (`width/change.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_dflash.width.change import Change

PRIOR = 0.8
"""Hazard before any observation: published drafters accept about 4 to 6 tokens of 16."""
FIRST_PRIOR_TRIES, NEIGHBOUR_TRIES = 1.0, 4.0
"""How many tries the prior, and the hazard of the position before, count for."""
START_TRIES = 10.0
"""More of the first's, which fade as observations do: a server's first requests are often a warm-up of odd prompts."""
MEMORY, PLAIN_MEMORY = 64.0, 1024.0
"""Drafting steps until evidence has faded to 1/e, and plain steps."""
KEPT_TRIES = 2.0
"""How many tries a position's evidence from before a change counts for afterwards."""
SUSPICION = 0.75
"""Log-likelihood ratio from which a change for the better is worth a closer look: a success where few are usual."""
_LEAST_SPREAD = 0.02  # a hazard of 1 has no variance, and then the first rejection would be a change
_RESCALE = 1e9


class Survival:
    """Hazards of the drafted positions, pooled over requests.

    Args:
        max_width: widest block, anchor included.
    """

    def __init__(self, max_width: int) -> None:
        self.max_width = max_width
        # Index j is the draft's position; 0, the anchor, stays empty. A new observation weighs `_unit`, which grows
        # instead of all older ones shrinking.
        self._tries = [0.0] * max_width
        self._commits = [0.0] * max_width
        self._cuts = [0.0] * max_width
        if max_width > 1:
            self._tries[1], self._commits[1] = START_TRIES, PRIOR * START_TRIES
        self._unit = 1.0
        self.hazards = [1.0] + [PRIOR] * (max_width - 1)
        self._tokens = [0.0] * (max_width + 1)
        self._refresh()
        self._fewer, self._more = Change(self._counts()), Change(self._counts())
        self.changes = 0

    def expected_tokens(self, width: int) -> float:
        """Tokens that a step of this width commits for one request, bonus included: 1 + sum of the survival curve."""
        return self._tokens[width]

    def curve(self) -> list[float]:
        """P(draft j committed), j = 1 ... max_width - 1."""
        return [self._tokens[j + 1] - self._tokens[j] for j in range(1, self.max_width)]

    @property
    def seems_better(self) -> bool:
        """Recent steps suggest, without being certain, that drafts survive better than the hazards say."""
        return self._more.rose and self._more.score > SUSPICION

    def evidence(self) -> list[float]:
        """Tries behind each hazard that have not faded, j = 1 ... max_width - 1."""
        return [tries / self._unit for tries in self._tries[1:]]

    def observe(self, width: int, accept_lens: Sequence[int], verify_lens: Sequence[int] | None = None) -> None:
        """Count a finished step.

        Args:
            width: positions of the block, anchor included.
            accept_lens: accepted drafts plus bonus of each request: 1 ... width.
            verify_lens: verified positions of each request, anchor included; None if all were.
        """
        if width <= 1:
            self._unit *= 1 + 1 / PLAIN_MEMORY
            return
        ends = [0] * (width + 1)
        for length in accept_lens:
            ends[length] += 1
        self._unit = unit = self._unit * (1 + 1 / MEMORY)
        tries, commits, hazards = self._tries, self._commits, self.hazards
        reached, excess, variance = len(accept_lens), 0.0, 0.0
        for j in range(1, width):
            if not reached:
                break
            hazard, weight = hazards[j], reached * unit
            expected = reached * hazard
            spread = hazard * (1 - hazard)
            if spread < _LEAST_SPREAD:
                spread = _LEAST_SPREAD
            # The hazard itself is only known from so many tries.
            variance += reached * spread * (1 + weight / (tries[j] + FIRST_PRIOR_TRIES * unit))
            tries[j] += weight
            reached -= ends[j]
            commits[j] += reached * unit
            excess += reached - expected
        if verify_lens is not None:
            for accepted, verified in zip(accept_lens, verify_lens, strict=True):
                if accepted == verified < width:
                    self._cuts[verified] += unit
        self._follow(excess, variance)
        if self._unit > _RESCALE:
            self._rescale()
        self._refresh()

    def _follow(self, excess: float, variance: float) -> None:
        """Drop what came before a change, if this step makes one certain; ``excess`` is commits less those expected."""
        fewer, more = self._fewer, self._more
        for change, surplus in ((fewer, -excess), (more, excess)):
            if change.is_certain(surplus, variance):
                most, tries_before = KEPT_TRIES * self._unit, change.before[0]
                shares = [1 - most / old if old > most else 0.0 for old in tries_before]
                for counts, before in zip((self._tries, self._commits, self._cuts), change.before, strict=True):
                    counts[:] = [count - share * old for count, share, old in zip(counts, shares, before, strict=True)]
                fewer.score = more.score = 0.0
                self.changes += 1
        if not fewer.score or not more.score:
            now = self._counts()
            if not fewer.score:
                fewer.before = now
            if not more.score:
                more.before = now

    def _counts(self) -> tuple[list[float], ...]:
        return self._tries[:], self._commits[:], self._cuts[:]

    def _refresh(self) -> None:
        tries, commits, hazards, tokens = self._tries, self._commits, self.hazards, self._tokens
        weight, hazard, alive, total = FIRST_PRIOR_TRIES * self._unit, PRIOR, 1.0, 1.0
        tokens[1] = 1.0
        for j in range(1, self.max_width):
            hazards[j] = hazard = (commits[j] + weight * hazard) / (tries[j] + weight)
            if j == 1:
                weight = NEIGHBOUR_TRIES * self._unit
            alive *= hazard
            total += alive
            tokens[j + 1] = total

    def _rescale(self) -> None:
        for counts in (self._tries, self._commits, self._cuts):
            counts[:] = [count / self._unit for count in counts]
        self._unit = 1.0
        self._fewer.before = self._more.before = self._counts()

    def as_dict(self) -> dict[str, Any]:
        """For ``/server_info``: by position, j = 1 ... max_width - 1."""
        verified = [tries - cuts for tries, cuts in zip(self._tries[1:], self._cuts[1:], strict=True)]
        alone = [
            commits / count if count > 0 else None for commits, count in zip(self._commits[1:], verified, strict=True)
        ]
        return {
            "hazards": _rounded(self.hazards[1:]),
            "curve": _rounded(self.curve()),
            "accepted_if_verified": _rounded(alone),
            "evidence": _rounded(self.evidence()),
            "changes": self.changes,
        }


def _rounded(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else round(value, 4) for value in values]
