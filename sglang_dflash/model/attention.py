"""The drafter's attention: queries of the block over context K/V and the block itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import QKVParallelLinear, RowParallelLinear
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from torch import Tensor, nn

from sglang_dflash.drafter.config import DrafterConfig
from sglang_dflash.drafter.formats import SLIDING
from sglang_dflash.ops import norm_rope


class QKNormRope(nn.Module):
    """Q and K norms of all layers, and RoPE.

    Args:
        norms: (Q norm, K norm) of each layer; their weights become views of one tensor.
        positions: rows of the RoPE table, allocated here because CUDA graphs store its address.
    """

    def __init__(
        self,
        norms: list[tuple[nn.Module, nn.Module]],
        num_heads: int,
        num_kv_heads: int,
        eps: float,
        rotary: Any,
        positions: int,
    ) -> None:
        super().__init__()
        rotary._ensure_cos_sin_cache_length(positions - 1)
        self._eps, self.rotary = eps, rotary
        params: list[Any] = [norm.weight for pair in norms for norm in pair]
        rows = torch.stack([param.data for param in params])
        for param, row in zip(params, rows, strict=True):
            param.data = row
        self._weights = rows.unflatten(0, (len(norms), 2))
        # no buffer: /weights_checker would reset it, and updates would not restore it
        self._row_of_head = torch.tensor([0] * num_heads + [1] * num_kv_heads, device=rows.device)

    def block(self, positions: Tensor) -> BlockNormRope:
        self._assert_in_table(positions)
        return BlockNormRope(self, positions, self._weights.index_select(1, self._row_of_head))

    def context_keys(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Normalise and rotate all layers' keys [L, T, num_kv_heads, head_dim]."""
        self._assert_in_table(positions)
        return self.rotate(keys, self._weights[:, 1:].expand(-1, keys.shape[2], -1), positions)

    def rotate(self, heads: Tensor, weights: Tensor, positions: Tensor) -> Tensor:
        rotary = self.rotary
        return norm_rope(heads, weights, self._eps, positions, rotary.cos_sin_cache, neox=rotary.is_neox_style)

    def _assert_in_table(self, positions: Tensor) -> None:
        if positions.is_cpu:  # on a GPU the check would synchronise
            rows = self.rotary.cos_sin_cache.shape[0]
            last = positions.numpy().max(initial=0)
            assert last < rows, f"position {last} in a RoPE table of {rows} rows"


@dataclass(frozen=True)
class BlockNormRope:
    """Positions of one forward, int64 [T], and norm weights, [L, num_heads + num_kv_heads, head_dim]."""

    layers: QKNormRope
    positions: Tensor
    weights: Tensor

    def __call__(self, layer_id: int, qkv: Tensor, query_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return a layer's normalised and rotated Q and K, and V, each [T, heads * head_dim]."""
        weights = self.weights[layer_id, None]
        heads, head_dim = weights.shape[1:]
        rotated = self.layers.rotate(qkv.unflatten(1, (-1, head_dim))[None, :, :heads], weights, self.positions)
        rotated = rotated.view(-1, heads * head_dim)
        return rotated[:, :query_size], rotated[:, query_size:], qkv[:, heads * head_dim :]


class DrafterAttention(nn.Module):
    def __init__(self, config: DrafterConfig, layer_id: int, quant_config: Any, prefix: str) -> None:
        super().__init__()
        self.head_dim = head_dim = config.head_dim
        hidden, shared = config.hidden_size, {"bias": config.attention_bias, "quant_config": quant_config}
        self.qkv_proj = QKVParallelLinear(
            hidden, head_dim, config.num_heads, config.num_kv_heads, prefix=f"{prefix}.qkv_proj", **shared
        )
        self.o_proj = RowParallelLinear(config.num_heads * head_dim, hidden, prefix=f"{prefix}.o_proj", **shared)
        self.q_norm = RMSNorm(head_dim, eps=config.rms_norm_eps)
        self.k_norm = RMSNorm(head_dim, eps=config.rms_norm_eps)
        self.num_heads, self.num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.query_size = self.num_heads * head_dim
        self.attn = RadixAttention(
            self.num_heads,
            head_dim,
            head_dim**-0.5,
            self.num_kv_heads,
            layer_id=layer_id,
            sliding_window_size=window_left(config) if config.layer_types[layer_id] == SLIDING else -1,
            attn_type=AttentionType.DECODER if config.causal[layer_id] else AttentionType.ENCODER_ONLY,
        )

    def forward(self, norm_rope: BlockNormRope, hidden: Tensor, forward_batch: Any) -> Tensor:
        """Attend from the block (``hidden`` [bs * w, H]) and write its K/V to its KV slots."""
        qkv, _ = self.qkv_proj(hidden)
        q, k, v = norm_rope(self.attn.layer_id, qkv, self.query_size)
        out, _ = self.o_proj(self.attn(q, k, v, forward_batch))
        return out


def window_left(config: DrafterConfig) -> int:
    """Return the window in SGLang's count: tokens *before* the current one."""
    assert config.sliding_window is not None
    return config.sliding_window - 1


class ContextProjection:
    """Projection of fused context vectors to K/V of all layers, in one batched matrix product."""

    def __init__(self, attentions: list[DrafterAttention], norm_rope: QKNormRope) -> None:
        self.attentions, self._norm_rope = attentions, norm_rope
        self._weight: Tensor | None = None
        if all(isinstance(a.qkv_proj.quant_method, UnquantizedLinearMethod) for a in attentions):
            self._weight = _stack([a.qkv_proj.weight.data for a in attentions])
            for attention, weight in zip(attentions, self._weight, strict=True):
                attention.qkv_proj.weight.data = weight

    def __call__(self, context: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return K (normalised, rotated) and V, each [L, T, kv_heads of this rank, head_dim].

        Args:
            context: [T, H], fused context vectors.
            positions: int64 [T], absolute.
        """
        first = self.attentions[0]
        kv = self._project(context, first.query_size).unflatten(-1, (2, first.num_kv_heads, first.head_dim))
        return self._norm_rope.context_keys(kv[:, :, 0], positions), kv[:, :, 1]

    def _project(self, context: Tensor, query_size: int) -> Tensor:
        if self._weight is None:
            return torch.stack([a.qkv_proj(context)[0][:, query_size:] for a in self.attentions])
        kv = context @ self._weight[:, query_size:].transpose(1, 2)
        biases = [a.qkv_proj.bias for a in self.attentions]
        if biases[0] is None:
            return kv
        return kv + torch.stack(biases)[:, None, query_size:]


def _stack(weights: list[Tensor]) -> Tensor:
    # weights [O, I] to [L, O, I], in the first one's memory order
    by_input = weights[0].t().is_contiguous()
    return torch.stack([w.t() for w in weights]).transpose(1, 2) if by_input else torch.stack(weights)
