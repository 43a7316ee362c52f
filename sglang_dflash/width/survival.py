"""Survival curve of the drafts in a block: a hazard for each position, learned from blocks of any width.

The hazard ``h_j``, j = 1 ... max_width - 1, is P(draft j is committed | drafts 1 ... j-1 are). A step of width w
observes a request up to its first rejection, or up to draft w - 1, and says nothing about later drafts. The estimate is
therefore commits over tries, counted among the requests that reached draft j (Kaplan and Meier, 1958), with counts that
fade.

Evidence at every position fades with each step. Where it runs out, the hazard falls back to that of the position
before, and the first one to a prior. Plain steps bring no evidence and age it little. A CUSUM test (`width/cusum.py`)
detects a change of traffic and drops the evidence from before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_dflash.width.cusum import Cusum

PRIOR = 0.8
"""Hazard before any observation: published drafters accept about 4 to 6 tokens of 16."""
FIRST_PRIOR_TRIES, NEIGHBOUR_TRIES = 1.0, 4.0
"""Weight, in tries, of the prior and of the previous position's hazard."""
START_TRIES = 10.0
"""Extra weight of the prior at the start, which fades: the first requests are often a warm-up with odd prompts."""
MEMORY, PLAIN_MEMORY = 64.0, 1024.0
"""Drafting steps, and plain steps, after which evidence has faded to 1/e."""
KEPT_TRIES = 2.0
"""Tries per position that the evidence from before a change still counts for."""
SUSPICION = 0.75
"""Log-likelihood ratio at which a change for the better is worth a closer look: one success where few are usual."""
_LEAST_SPREAD = 0.02  # at a hazard of 1 the variance would be 0, and the first rejection would count as a change
_RESCALE = 1e9


class Survival:
    """Hazards of the drafted positions, pooled over requests.

    Args:
        max_width: widest block, anchor included.
        prior: hazard before any observation.

    Attributes:
        tokens: by width, those that a step commits per request, bonus included: 1 + sum over k < width of S_k.
    """

    def __init__(self, max_width: int, prior: float = PRIOR) -> None:
        self.max_width, self._prior = max_width, prior
        # By draft position; index 0 is the anchor and stays empty. Counts are in units of `_unit`, which grows with
        # each step: new evidence weighs more, instead of all old evidence shrinking.
        self._tries, self._commits = [0.0] * max_width, [0.0] * max_width
        if max_width > 1:
            self._tries[1], self._commits[1] = START_TRIES, prior * START_TRIES
        self._unit = 1.0
        self.hazards = [1.0] + [prior] * (max_width - 1)
        self.tokens = [0.0] * (max_width + 1)
        self._refresh()
        self._worse, self._better = Cusum(self._counts()), Cusum(self._counts())
        self.changes = 0

    def curve(self) -> list[float]:
        """Survival S_j = h_1 ... h_j = P(draft j is committed), j = 1 ... max_width - 1."""
        return [self.tokens[j + 1] - self.tokens[j] for j in range(1, self.max_width)]

    def evidence(self) -> list[float]:
        """Tries behind each hazard that have not faded, j = 1 ... max_width - 1."""
        return [tries / self._unit for tries in self._tries[1:]]

    @property
    def evidence_of_first(self) -> float:
        return self._tries[1] / self._unit

    @property
    def seems_better(self) -> bool:
        """Whether recent steps suggest, without being certain, that drafts survive better than the hazards say."""
        return self._better.rose and self._better.score > SUSPICION

    def observe(self, width: int, accept_lens: Sequence[int]) -> None:
        """Count a finished step.

        Args:
            width: positions of the block, anchor included.
            accept_lens: accepted drafts plus bonus of each request: 1 ... width.
        """
        if width <= 1:
            self._unit *= 1 + 1 / PLAIN_MEMORY
            return
        self._unit *= 1 + 1 / MEMORY
        surplus, variance = self._count(width, accept_lens)
        self._test_for_change(surplus, variance)
        if self._unit > _RESCALE:
            self._rescale()
        self._refresh()

    def _count(self, width: int, accept_lens: Sequence[int]) -> tuple[float, float]:
        """Add a step's tries and commits -> commits beyond those expected, and the variance of that difference."""
        ends = [0] * (width + 1)
        for length in accept_lens:
            ends[length] += 1
        tries, commits, hazards, unit = self._tries, self._commits, self.hazards, self._unit
        reached, surplus, variance = len(accept_lens), 0.0, 0.0
        for j in range(1, width):
            if not reached:
                break
            hazard, weight = hazards[j], reached * unit
            spread = max(hazard * (1 - hazard), _LEAST_SPREAD)
            # The second term: the hazard itself is an estimate, from so many tries.
            variance += reached * spread * (1 + weight / (tries[j] + FIRST_PRIOR_TRIES * unit))
            surplus -= reached * hazard
            reached -= ends[j]
            surplus += reached
            tries[j] += weight
            commits[j] += reached * unit
        return surplus, variance

    def _test_for_change(self, surplus: float, variance: float) -> None:
        worse, better = self._worse, self._better
        for test, excess in ((worse, -surplus), (better, surplus)):
            if test.is_certain(excess, variance):
                self._forget(*test.before)
                worse.score = better.score = 0.0
                self.changes += 1
        if not worse.score or not better.score:
            counts = self._counts()
            for test in (worse, better):
                if not test.score:
                    test.before = counts

    def _forget(self, tries: Sequence[float], commits: Sequence[float]) -> None:
        """Drop all but ``KEPT_TRIES`` of these earlier counts."""
        kept = KEPT_TRIES * self._unit
        for j, (tried, committed) in enumerate(zip(tries, commits, strict=True)):
            if tried > kept:
                dropped = 1 - kept / tried
                self._tries[j] -= dropped * tried
                self._commits[j] -= dropped * committed

    def _counts(self) -> tuple[list[float], list[float]]:
        return self._tries[:], self._commits[:]

    def _refresh(self) -> None:
        """Derive the hazards and the tokens of each width from the counts."""
        tries, commits, hazards, tokens = self._tries, self._commits, self.hazards, self.tokens
        weight, hazard, survival, total = FIRST_PRIOR_TRIES * self._unit, self._prior, 1.0, 1.0
        tokens[1] = 1.0
        for j in range(1, self.max_width):
            hazards[j] = hazard = (commits[j] + weight * hazard) / (tries[j] + weight)
            weight = NEIGHBOUR_TRIES * self._unit
            survival *= hazard
            total += survival
            tokens[j + 1] = total

    def _rescale(self) -> None:
        def scaled(counts: list[float]) -> list[float]:
            return [count / self._unit for count in counts]

        for test in (self._worse, self._better):
            tries, commits = test.before
            test.before = scaled(tries), scaled(commits)
        self._tries, self._commits, self._unit = scaled(self._tries), scaled(self._commits), 1.0

    def as_dict(self) -> dict[str, Any]:
        """The part of ``/server_info``, by draft position 1 ... max_width - 1."""
        by_position = {"hazards": self.hazards[1:], "curve": self.curve(), "evidence": self.evidence()}
        return {name: [round(value, 4) for value in values] for name, values in by_position.items()} | {
            "changes": self.changes
        }
