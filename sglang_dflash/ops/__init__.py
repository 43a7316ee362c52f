"""Operations of one decode step: a definition in torch (:mod:`.reference`), and Triton kernels of most (``kernels/``).

:mod:`.dispatch` chooses between the two. :mod:`sglang_dflash.states` has the operations of recurrent states.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dflash.ops import reference
from sglang_dflash.ops.dispatch import by_device, runs_kernels
from sglang_dflash.ops.reference import Accepted, Block, token_hash

__all__ = [
    "Accepted",
    "Block",
    "accept_block",
    "argmax",
    "filter_probs",
    "find_copies",
    "linear",
    "norm_rope",
    "note_tokens",
    "offer_copies",
    "penalize_block",
    "prepare_block",
    "seeded_draw",
    "token_hash",
    "top_two",
]

_KERNELS = "sglang_dflash.ops.kernels"

prepare_block = by_device(reference.prepare_block, f"{_KERNELS}.prepare_block")
accept_block = by_device(reference.accept_block, f"{_KERNELS}.accept_block")
note_tokens = by_device(reference.note_tokens, f"{_KERNELS}.copies")
find_copies = by_device(reference.find_copies, f"{_KERNELS}.copies")
offer_copies = by_device(reference.offer_copies, f"{_KERNELS}.copies")
norm_rope = by_device(reference.norm_rope, f"{_KERNELS}.norm_rope")
penalize_block = by_device(reference.penalize_block, f"{_KERNELS}.penalize_block")
seeded_draw = by_device(reference.seeded_draw, f"{_KERNELS}.seeded_draw")
argmax = by_device(reference.argmax)
linear = by_device(reference.linear)


def filter_probs(probs: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor) -> Tensor:
    """Run :func:`sglang_dflash.ops.reference.filter_probs`; on CUDA by SGLang's kernels, which need no sort.

    As in SGLang's joint sampling, top-k and top-p both read the whole distribution. Only the support of the
    renormalised probabilities is used, so the rounding of a sum changes no weight.
    """
    if not runs_kernels(probs):
        return reference.filter_probs(probs, top_ks, top_ps, min_ps)
    from sglang_dflash.upstream import top_k_renorm_prob, top_p_renorm_prob  # SGLang defines them on CUDA only

    keep = top_k_renorm_prob(probs, top_ks) > 0
    # A sum that rounds above its limit must not cut the tail of a row without a limit.
    keep &= (top_p_renorm_prob(probs, top_ps.clamp(max=1)) > 0) | (top_ps >= 1)[:, None]
    keep &= probs >= probs.amax(dim=-1, keepdim=True) * min_ps[:, None]
    return torch.where(keep, probs, 0.0)


def top_two(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return :func:`argmax` int64 [rows], and the largest and second largest value of each row, float32 [rows].

    Args:
        logits: [rows, V]; overwritten.
    """
    index = argmax(logits)[:, None]
    best = logits.gather(1, index)
    second = logits.scatter_(1, index, -torch.inf).amax(1)
    return index.squeeze(1), best.squeeze(1).float(), second.float()
