"""Expected tokens of a block: how far its drafts survive, learned from blocks of any width.

The hazard ``h_j`` is P(draft j is committed | drafts 1 ... j-1 are): commits over tries (Kaplan and Meier, 1958), with
counts that fade. Without evidence it falls back to the previous position, and finally to a prior. A CUSUM test (Page,
1954) detects a change of traffic and drops older evidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
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
_RESCALE = 1e9

Counts = tuple[list[float], list[float]]


class Cusum:
    """One-sided test for a change: a log-likelihood ratio that restarts at 0.

    A surplus of s drafts adds, to second order, ``TILT * s - TILT**2 / 2 * v``, where v is the variance of s. The last
    restart is the likeliest moment of the change; ``before`` has its counts.
    """

    def __init__(self, before: Counts) -> None:
        self.score, self.rose, self.before = 0.0, False, before

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
        # counts are in `_units`, which grow with each step, instead of all old evidence fading
        self._tries, self._commits = [0.0] * max_width, [0.0] * max_width
        if max_width > 1 and pool is None:
            self._tries[1], self._commits[1] = START_TRIES, prior * START_TRIES
        self._units = [1.0] * max_width
        self.hazards = [1.0] + [prior] * (max_width - 1)
        self.tokens = [0.0] * (max_width + 1)
        self.refresh()
        self._worse, self._better = Cusum(self._counts()), Cusum(self._counts())
        self.changes = 0

    def curve(self) -> list[float]:
        """Return the survival S_j = h_1 ... h_j = P(draft j is committed), j = 1 ... max_width - 1."""
        return [self.tokens[j + 1] - self.tokens[j] for j in range(1, self.max_width)]

    def evidence(self) -> list[float]:
        """Return the unfaded tries behind each hazard."""
        return [tries / unit for tries, unit in zip(self._tries[1:], self._units[1:], strict=True)]

    @property
    def may_have_improved(self) -> bool:
        """Whether recent steps suggest that drafts survive better than the hazards."""
        return self._better.rose and self._better.score > SUSPICION

    def observe(self, width: int, accept_lens: Sequence[int]) -> None:
        """Count a finished step; evidence ages without requests too."""
        tried = width if accept_lens else 1
        often, rarely, units = 1 + 1 / MEMORY, 1 + 1 / PLAIN_MEMORY, self._units
        self._units = [unit * often for unit in units[:tried]] + [unit * rarely for unit in units[tried:]]
        if self._units[0] > _RESCALE:
            self._rescale()
        if tried > 1:
            self._test_for_change(*self._count(width, accept_lens))
            self.refresh()

    def _count(self, width: int, accept_lens: Sequence[int]) -> tuple[float, float]:
        # add tries and commits; return the surplus over the expectation, and its variance
        ends = [0] * (width + 1)
        for length in accept_lens:
            ends[length] += 1
        tries, commits, hazards, units = self._tries, self._commits, self.hazards, self._units
        reached, surplus, variance = len(accept_lens), 0.0, 0.0
        for j in range(1, width):
            if not reached:
                break
            hazard, unit, weight = hazards[j], units[j], reached * units[j]
            spread = max(hazard * (1 - hazard), _MIN_SPREAD)
            # the hazard itself is an estimate, from so many tries
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
        self._tries = [now - old for now, old in zip(self._tries, tries, strict=True)]
        self._commits = [now - old for now, old in zip(self._commits, commits, strict=True)]

    def _counts(self) -> Counts:
        return self._tries[:], self._commits[:]

    def refresh(self) -> None:
        """Recompute the hazards; only needed if the pool has changed."""
        tries, commits, hazards, tokens = self._tries, self._commits, self.hazards, self.tokens
        weight, hazard, survival, total = FIRST_PRIOR_TRIES, self._prior, 1.0, 1.0
        tokens[1] = 1.0
        for j in range(1, self.max_width):
            if self._pool is not None:
                weight, hazard = POOL_TRIES, self._pool.hazards[j]
            unit = weight * self._units[j]
            hazards[j] = hazard = (commits[j] + unit * hazard) / (tries[j] + unit)
            weight = NEIGHBOUR_TRIES
            survival *= hazard
            total += survival
            tokens[j + 1] = total

    def _rescale(self) -> None:
        def scaled(counts: list[float]) -> list[float]:
            return [count / unit for count, unit in zip(counts, self._units, strict=True)]

        for test in (self._worse, self._better):
            tries, commits = test.before
            test.before = scaled(tries), scaled(commits)
        self._tries, self._commits = scaled(self._tries), scaled(self._commits)
        self._units = [1.0] * self.max_width

    def as_dict(self) -> dict[str, Any]:
        by_position = {"hazards": self.hazards[1:], "curve": self.curve(), "evidence": self.evidence()}
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
        # If a draft were right in any block or in none, one step of `path` would replace sum(ends[::width]) steps of
        # `width`: ends[k] is the share of blocks with k to k + path - 1 right drafts. But drafts near the anchor are
        # better, so narrower blocks yield at least what the survival predicts; so do wider ones that copy.
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
