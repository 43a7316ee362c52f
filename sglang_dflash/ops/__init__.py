"""Operations of one decode step: a definition in torch (:mod:`.reference`) and a Triton kernel of each.

:mod:`.dispatch` chooses between the two. Recurrent states have operations of their own (:mod:`sglang_dflash.states`).
"""

from __future__ import annotations

from sglang_dflash.ops import on_cpu, reference
from sglang_dflash.ops.dense import argmax, linear, top_two
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
note_tokens = by_device(reference.note_tokens, _KERNELS, on_cpu.note_tokens)
find_copies = by_device(reference.find_copies, _KERNELS, on_cpu.find_copies)
offer_copies = by_device(reference.offer_copies, _KERNELS, on_cpu.offer_copies)
norm_rope = by_device(reference.norm_rope, _KERNELS)
penalize_block = by_device(reference.penalize_block, _KERNELS)
filter_probs = by_device(reference.filter_probs, _KERNELS)
seeded_draw = by_device(reference.seeded_draw, _KERNELS)
