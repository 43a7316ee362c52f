""":func:`sglang_dflash.ops.reference.filter_probs` with SGLang's CUDA kernels, which find a cutoff without a sort.

As in SGLang's joint sampling, top-k and top-p both look at the whole distribution. Of the renormalised probabilities
only the support is used: the weights are those of ``probs``, whatever the rounding of a sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dflash.upstream import top_k_renorm_prob, top_p_renorm_prob


def filter_probs(probs: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor) -> Tensor:
    keep = top_k_renorm_prob(probs, top_ks) > 0
    # A sum that rounds above its limit must not cut the tail of a row without a limit.
    keep &= (top_p_renorm_prob(probs, top_ps.clamp(max=1)) > 0) | (top_ps >= 1)[:, None]
    keep &= probs >= probs.amax(dim=-1, keepdim=True) * min_ps[:, None]
    return torch.where(keep, probs, 0.0)
