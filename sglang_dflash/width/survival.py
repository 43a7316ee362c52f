"""Expected tokens of a block: how far its drafts survive, learned from blocks of any width.

The hazard ``h_j`` is P(draft j is committed | drafts 1 ... j-1 are): commits over tries (Kaplan and Meier, 1958), with
counts that fade. Without evidence it falls back to the previous position, and finally to a prior. A CUSUM test (Page,
1954) detects a change of traffic and drops older evidence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from operator import mul
from typing import Any

from sglang_dflash.width.policy import BUCKETS

PRIOR, MATCHED_PRIOR = 0.8, 0.9  # published drafters accept about 4 to 6 tokens of 16
# weights, in tries, of the prior, of the previous position's hazard and of the pool's
FIRST_PRIOR_TRIES, NEIGHBOUR_TRIES, POOL_TRIES = 1.0, 4.0, 8.0
# first requests are often a warm-up with odd prompts
START_TRIES = 10.0
MEMORY, PLAIN_MEMORY = 64.0, 1024.0  # steps after which evidence has faded to 1/e: of tried and untried positions
TILT = 1.5  # change to detect, in log odds of a draft's acceptance: from 0.5 to 0.8, say
CERTAIN = 7.0  # log-likelihood ratio of a certain change: one false alarm in several thousand steps
# log-likelihood ratio at which an improvement is worth a probe
SUSPICION = 0.75
_MIN_SPREAD = 0.02  # at a hazard of 1 the first rejection would count as a change


class Counts:
    """Tries and commits of each position, which fade."""

    def __init__(self, positions: int) -> None:
        self.tries, self.commits = [0.0] * positions, [0.0] * positions

    def fade(self, shares: Sequence[float]) -> None:
        self.tries, self.commits = list(map(mul, self.tries, shares)), list(map(mul, self.commits, shares))


class Cusum:
    """One-sided test for a change: a log-likelihood ratio that restarts at 0.

    A surplus of s drafts adds, to second order, ``TILT * s - TILT**2 / 2 * v``, where v is the variance of s. The last
    restart is the likeliest moment of the change; ``since`` has the counts after it.
    """

    def __init__(self, positions: int) -> None:
        self.score, self.rose, self.since = 0.0, False, Counts(positions)

    def is_certain(self, surplus: float, variance: float) -> bool:
        """Add a step's surplus of commits; return whether a change is certain."""
        step = TILT * surplus - TILT * TILT / 2 * variance
        self.rose = step > 0
        self.score = max(self.score + step, 0.0)
        return self.score > CERTAIN


class Survival:
    """Hazards of the drafted positions, pooled over requests.

    ``tokens``, by width, are the tokens that a step commits per request, bonus included: 1 + sum over k < width of S_k.
    A ``pool``'s hazards are the prior.
    """

    def __init__(self, max_width: int, prior: float = PRIOR, pool: Survival | None = None) -> None:
        self.max_width, self._prior, self._pool = max_width, prior, pool
        self._counts, self._worse, self._better = Counts(max_width), Cusum(max_width), Cusum(max_width)
        if max_width > 1 and pool is None:
            self._counts.tries[1], self._counts.commits[1] = START_TRIES, prior * START_TRIES
        self.hazards = [1.0] + [prior] * (max_width - 1)
        self.tokens = [0.0, 1.0] + [0.0] * (max_width - 1)
        self.refresh()
        self.changes = 0

    def curve(self) -> list[float]:
        """Return the survival S_j = h_1 ... h_j = P(draft j is committed), j = 1 ... max_width - 1."""
        return [self.tokens[j + 1] - self.tokens[j] for j in range(1, self.max_width)]

    @property
    def may_have_improved(self) -> bool:
        """Whether recent steps suggest that drafts survive better than the hazards."""
        return self._better.rose and self._better.score > SUSPICION

    def observe(self, width: int, accept_lens: Sequence[int]) -> None:
        """Count a finished step; evidence ages without requests too."""
        tried = width if accept_lens else 1
        often, rarely = 1 / (1 + 1 / MEMORY), 1 / (1 + 1 / PLAIN_MEMORY)
        shares = [often] * tried + [rarely] * (self.max_width - tried)
        for counts in (self._counts, self._worse.since, self._better.since):
            counts.fade(shares)
        if tried > 1:
            self._test_for_change(*self._count(width, accept_lens))
            self.refresh()

    def _count(self, width: int, accept_lens: Sequence[int]) -> tuple[float, float]:
        # add tries and commits; return the surplus over the expectation, and its variance
        counted = [(each.tries, each.commits) for each in (self._counts, self._worse.since, self._better.since)]
        ends, reached, surplus, variance = Counter(accept_lens), len(accept_lens), 0.0, 0.0
        for j in range(1, width):
            if not reached:
                break
            hazard, left = self.hazards[j], reached - ends[j]
            spread = max(hazard * (1 - hazard), _MIN_SPREAD)
            # the hazard itself is an estimate, from so many tries
            variance += reached * spread * (1 + reached / (self._counts.tries[j] + FIRST_PRIOR_TRIES))
            surplus += left - reached * hazard
            for tries, commits in counted:
                tries[j] += reached
                commits[j] += left
            reached = left
        return surplus, variance

    def _test_for_change(self, surplus: float, variance: float) -> None:
        tests = {self._worse: -surplus, self._better: surplus}
        for test, excess in tests.items():
            if test.is_certain(excess, variance):
                self._counts = test.since
                self._worse.score = self._better.score = 0.0
                self.changes += 1
        for test in tests:
            if not test.score:
                test.since = Counts(self.max_width)

    def refresh(self) -> None:
        """Recompute the hazards; only needed if the pool has changed."""
        tries, commits = self._counts.tries, self._counts.commits
        weight, hazard, survival = FIRST_PRIOR_TRIES, self._prior, 1.0
        for j in range(1, self.max_width):
            if self._pool is not None:
                weight, hazard = POOL_TRIES, self._pool.hazards[j]
            hazard = (commits[j] + weight * hazard) / (tries[j] + weight)
            weight = NEIGHBOUR_TRIES
            survival *= hazard
            self.hazards[j], self.tokens[j + 1] = hazard, self.tokens[j] + survival

    def as_dict(self) -> dict[str, Any]:
        by_position = {"hazards": self.hazards[1:], "curve": self.curve(), "evidence": self._counts.tries[1:]}
        return {name: [round(value, 4) for value in values] for name, values in by_position.items()} | {
            "changes": self.changes
        }


class SurvivalByMatch:
    """Survival by bucket of match length when the width was chosen: copies survive further than drafts.

    All matched requests are the prior of each of their buckets. The drafter drafts ``drafted`` positions.
    """

    def __init__(self, widths: Sequence[int], drafted: int) -> None:
        self._widths, self._drafted = widths, drafted
        self.unmatched, self.matched = Survival(drafted), Survival(widths[-1], MATCHED_PRIOR)
        self.buckets = [self.unmatched, *(Survival(widths[-1], pool=self.matched) for _ in range(1, BUCKETS))]

    def tokens(self, path: int, matches: Sequence[int] = ()) -> list[float]:
        """Return the tokens per step and request, by width, if all steps had that width.

        Args:
            path: width of the recent steps, whose counts are known.
            matches: as in :meth:`WidthPolicy.width`.
        """
        total, mean = sum(matches), [0.0] * len(self._widths)
        for count, survival in zip(matches, self.buckets, strict=True) if total else [(1, self.unmatched)]:
            if count:
                by_width = self._if_always(survival, path)
                mean = [sum_ + count / (total or 1) * each for sum_, each in zip(mean, by_width, strict=True)]
        return mean

    def _if_always(self, survival: Survival, path: int) -> list[float]:
        # Steps of `width` yield tokens[path] / sum(ends[::width]) if a draft is right in every block or in none, where
        # ends[k] is the share of blocks with k to k + path - 1 right drafts. A lower bound for narrower blocks, as
        # drafts near the anchor are better; an upper bound for wider ones, unless they copy.
        if survival is not self.unmatched:
            survival.refresh()
        tokens, most = survival.tokens, survival.max_width
        path = min(path, most)
        curve = [1.0, *survival.curve(), *[0.0] * path]
        ends = [now - later for now, later in zip(curve, curve[path:], strict=False)]
        found = []
        for width in (min(width, most) for width in self._widths):
            yielded, by_runs = tokens[width], tokens[path] / sum(ends[::width])
            if width < path:
                yielded = max(yielded, by_runs)
            elif survival is self.unmatched:
                yielded = min(yielded, by_runs)
            found.append(yielded)
        return found

    def observe(self, width: int, accept_lens: Sequence[int], buckets: Sequence[int]) -> None:
        by_bucket: list[list[int]] = [[] for _ in range(BUCKETS)]
        for length, bucket in zip(accept_lens, buckets or [0] * len(accept_lens), strict=True):
            by_bucket[bucket].append(length)
        self.matched.observe(width, list(chain(*by_bucket[1:])))
        for survival, lengths in zip(self.buckets[1:], by_bucket[1:], strict=True):
            if lengths:
                survival.observe(width, lengths)
        # accepted by chance, or from a match that the host had not read yet
        self.unmatched.observe(min(width, self._drafted), [min(length, self._drafted) for length in by_bucket[0]])
