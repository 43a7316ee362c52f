"""Probabilities in torch: the filters of two of SGLang's CUDA kernels, and a chi-square test of draws."""

from __future__ import annotations

import torch
from torch import Tensor


def top_k_renorm_prob(probs: Tensor, top_ks: Tensor) -> Tensor:
    """Return ``probs`` [rows, V] with only the ``top_ks`` int32 [rows] largest of each row kept, renormalised to 1."""
    cutoffs = probs.sort(dim=-1, descending=True).values.gather(1, top_ks.clamp(max=probs.shape[1])[:, None].long() - 1)
    kept = probs.where(probs >= cutoffs, 0.0)
    return kept / kept.sum(dim=-1, keepdim=True)


def top_p_renorm_prob(probs: Tensor, top_ps: Tensor) -> Tensor:
    """Return ``probs`` [rows, V] without the tail beyond ``top_ps`` float [rows] of the mass, renormalised to 1."""
    assert (top_ps <= 1).all()
    ranked, order = probs.sort(dim=-1, descending=True)
    kept = ranked.where(ranked.cumsum(dim=-1) - ranked < top_ps[:, None] - 1e-6, 0.0)  # tolerate rounding
    kept = torch.zeros_like(probs).scatter_(1, order, kept)
    return kept / kept.sum(dim=-1, keepdim=True)


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
