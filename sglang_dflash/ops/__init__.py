"""Operations of one decode step: a definition in torch (:mod:`.reference`) and a Triton kernel of each.

:mod:`.dispatch` chooses between the two. Recurrent states have operations of their own (:mod:`sglang_dflash.states`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dflash.ops import reference
from sglang_dflash.ops.dispatch import by_device
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

prepare_block = by_device(reference.prepare_block, _KERNELS)
accept_block = by_device(reference.accept_block, _KERNELS)
note_tokens = by_device(reference.note_tokens, _KERNELS)
find_copies = by_device(reference.find_copies, _KERNELS)
offer_copies = by_device(reference.offer_copies, _KERNELS)
norm_rope = by_device(reference.norm_rope, _KERNELS)
penalize_block = by_device(reference.penalize_block, _KERNELS)
filter_probs = by_device(reference.filter_probs, _KERNELS)
seeded_draw = by_device(reference.seeded_draw, _KERNELS)
argmax = by_device(reference.argmax)
linear = by_device(reference.linear)


def top_two(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`argmax`, with the largest and the second largest value of each row, float32 [rows].

    Args:
        logits: [rows, V], which is overwritten.
    """
    index = argmax(logits)[:, None]
    best = logits.gather(1, index)
    second = logits.scatter_(1, index, -torch.inf).amax(1)
    return index.squeeze(1), best.squeeze(1).float(), second.float()
