"""Expected tokens of a block: how far its drafts survive, estimated from blocks of any width.

The hazard ``h_j`` is P(draft j is committed | drafts 1 ... j-1 are): commits over tries (Kaplan and Meier, 1958), of
about the last ``MEMORY`` tries. With few tries it falls back to the previous position, and finally to a prior.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

PRIOR, MATCHED_PRIOR = 0.8, 0.9  # published drafters accept about 4 to 6 tokens of 16
MEMORY = 16.0  # tries of a position after which older ones have faded to 1/e
FIRST_PRIOR_TRIES, NEIGHBOUR_TRIES = 1.0, 4.0  # weights of the prior and of the previous position's hazard
START_TRIES = 10.0  # first requests are often a warm-up with odd prompts


class Survival:
    """Hazards of the drafted positions, pooled over requests.

    ``tokens``, by width, are the tokens that a step commits per request, bonus included: 1 + sum over k < width of S_k.
    """

    def __init__(self, max_width: int, prior: float = PRIOR) -> None:
        self.max_width, self._prior = max_width, prior
        self._tries, self._commits = [0.0] * max_width, [0.0] * max_width
        self._tries[1:2], self._commits[1:2] = [START_TRIES], [START_TRIES * prior]
        self.hazards, self.tokens = [1.0] * max_width, [0.0, 1.0] + [0.0] * (max_width - 1)
        self._refresh()

    def curve(self) -> list[float]:
        """Return the survival S_j = h_1 ... h_j = P(draft j is committed), j = 1 ... max_width - 1."""
        return [self.tokens[j + 1] - self.tokens[j] for j in range(1, self.max_width)]

    def observe(self, width: int, accept_lens: Sequence[int]) -> None:
        """Count a finished step."""
        ends, reached = Counter(accept_lens), len(accept_lens)
        for j in range(1, min(width, self.max_width)):
            kept, left = (1 - 1 / MEMORY) ** reached, reached - ends[j]
            self._tries[j] = kept * self._tries[j] + reached
            self._commits[j] = kept * self._commits[j] + left
            reached = left
        self._refresh()

    def tokens_if_always(self, widths: Sequence[int], recent: int) -> list[float]:
        """Return the tokens per step by width if all steps had that width; ``recent`` is the width of the counted ones.

        ``ends[k]`` is the share of blocks with k to k + recent - 1 right drafts. Steps of a width yield tokens[recent]
        / sum(ends[::width]) if drafts are equally good in all positions. Drafts near the anchor are better,
        so this is a lower bound for narrower blocks, and an upper bound for wider ones.
        """
        recent = min(recent, self.max_width)
        curve = [1.0, *self.curve(), *[0.0] * recent]
        ends = [now - later for now, later in zip(curve, curve[recent:], strict=False)]
        found = []
        for width in (min(width, self.max_width) for width in widths):
            bound = max if width < recent else min
            found.append(bound(self.tokens[width], self.tokens[recent] / sum(ends[::width])))
        return found

    def _refresh(self) -> None:
        weight, hazard, survival = FIRST_PRIOR_TRIES, self._prior, 1.0
        for j in range(1, self.max_width):
            hazard = (self._commits[j] + weight * hazard) / (self._tries[j] + weight)
            weight, survival = NEIGHBOUR_TRIES, survival * hazard
            self.hazards[j], self.tokens[j + 1] = hazard, self.tokens[j] + survival

    def as_dict(self) -> dict[str, Any]:
        by_position = {"hazards": self.hazards[1:], "curve": self.curve(), "evidence": self._tries[1:]}
        return {name: [round(value, 4) for value in values] for name, values in by_position.items()}
