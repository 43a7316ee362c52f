"""A chi-square test of draws."""

from __future__ import annotations

import torch
from torch import Tensor


def p_value(counts: Tensor, probs: Tensor) -> float:
    """Return the probability of a deviation at least this large if the draws follow ``probs`` (Pearson's chi-square).

    Outcomes with an expected count below 5 are pooled, as the approximation requires.

    Args:
        counts: [m] observed draws per outcome.
        probs: [m] probability per outcome, summing to 1. A drawn outcome of probability 0 gives p = 0.
    """
    counts, probs = counts.double().flatten(), probs.double().flatten()
    if bool((counts[probs == 0] > 0).any()):
        return 0.0
    expected = probs / probs.sum() * counts.sum()
    common = expected >= 5
    observed, expected = (torch.cat((x[common], x[~common].sum()[None])) for x in (counts, expected))
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(observed) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))
