"""Torch in place of two of SGLang's CUDA kernels, which filter probabilities."""

from __future__ import annotations

import torch
from torch import Tensor


def top_k_renorm_prob(probs: Tensor, top_ks: Tensor) -> Tensor:
    """``probs`` [rows, V] without all but the ``top_ks`` int32 [rows] largest of each row, with the sum 1."""
    cutoffs = probs.sort(dim=-1, descending=True).values.gather(1, top_ks.clamp(max=probs.shape[1])[:, None].long() - 1)
    kept = probs.where(probs >= cutoffs, 0.0)
    return kept / kept.sum(dim=-1, keepdim=True)


def top_p_renorm_prob(probs: Tensor, top_ps: Tensor) -> Tensor:
    """``probs`` [rows, V] without the tail behind ``top_ps`` float [rows] of the mass, with the sum 1."""
    assert (top_ps <= 1).all()
    ranked, order = probs.sort(dim=-1, descending=True)
    kept = ranked.where(ranked.cumsum(dim=-1) - ranked < top_ps[:, None] - 1e-6, 0.0)  # as rounding may have it
    kept = torch.zeros_like(probs).scatter_(1, order, kept)
    return kept / kept.sum(dim=-1, keepdim=True)
