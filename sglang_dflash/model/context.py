"""Context keys and values: what the drafter attends to in place of a prompt.

The target's hidden states of the captured layers, concatenated per token, are fused to one vector (``fc`` and
its norm); each drafter layer projects that vector to its own K and V. The drafter never runs over the context
itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dflash.model.attention import DrafterAttention
from sglang_dflash.model.norms import QKNormRope
from sglang_dflash.upstream import UnquantizedLinearMethod


class ContextProjection:
    """Fused context vectors to K/V of all layers at once.

    The layers' plain ``qkv_proj`` weights are laid out back to back in one tensor, of which each layer's parameter is a
    view: the K/V rows of all layers are then one batched matrix product, without a second copy that an update of the
    weights would miss. Quantised layers keep their own storage and run one by one.

    Args:
        attentions: the drafter's attention modules, in layer order; their weights may still be empty.
        norm_rope: their norms and rotation.
    """

    def __init__(self, attentions: list[DrafterAttention], norm_rope: QKNormRope) -> None:
        self.attentions, self._norm_rope = attentions, norm_rope
        first = attentions[0]
        self._num_kv_heads, self._head_dim = first.num_kv_heads, first.head_dim
        self._query_size, self._key_size, _ = first.sizes
        self._weight: Tensor | None = None
        if all(isinstance(a.qkv_proj.quant_method, UnquantizedLinearMethod) for a in attentions):
            self._weight = _stack([a.qkv_proj.weight.data for a in attentions])
            for attention, weight in zip(attentions, self._weight, strict=True):
                attention.qkv_proj.weight.data = weight

    def __call__(self, context: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of the context tokens.

        Args:
            context: [T, H], fused context vectors.
            positions: int64 [T], absolute positions.

        Returns:
            K (normalised, rotated) and V, each [L, T, kv_heads of this rank, head_dim].
        """
        kv = self._project(context).unflatten(-1, (2, self._num_kv_heads, self._head_dim))
        return self._norm_rope.context_keys(kv[:, :, 0], positions), kv[:, :, 1]

    def _project(self, context: Tensor) -> Tensor:
        """[L, T, 2 * kv_size]."""
        if self._weight is None:
            return torch.stack([a.qkv_proj(context)[0][:, self._query_size :] for a in self.attentions])
        kv = context @ self._weight[:, self._query_size :].transpose(1, 2)
        biases = [a.qkv_proj.bias for a in self.attentions]
        if biases[0] is None:
            return kv
        return kv + torch.stack(biases)[:, None, self._query_size :]


def _stack(weights: list[Tensor]) -> Tensor:
    """Weights [O, I] as [L, O, I], each stored as it was: output by output or input by input."""
    by_input = weights[0].t().is_contiguous()
    return torch.stack([w.t() for w in weights]).transpose(1, 2) if by_input else torch.stack(weights)
