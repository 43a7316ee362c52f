"""Pearson's chi-square test, with torch's incomplete gamma function for the p-value."""

from __future__ import annotations

import torch
from torch import Tensor


def p_value(counts: Tensor, probs: Tensor) -> float:
    """Probability of a deviation at least this large if the draws follow ``probs``.

    Args:
        counts: [m] observed draws per outcome.
        probs: [m] probability per outcome, summing to 1. An outcome of probability 0 that was drawn gives p =
            0.

    Outcomes that expect fewer than 5 draws are pooled, as the approximation needs.
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
