"""The drafter's attention: the block's queries over context K/V plus the block itself."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from sglang_dflash.drafter.config import DrafterConfig
from sglang_dflash.drafter.keys import SLIDING
from sglang_dflash.model.norms import BlockNormRope
from sglang_dflash.upstream import (
    AttentionType,
    QKVParallelLinear,
    RadixAttention,
    RMSNorm,
    RowParallelLinear,
)


class DrafterAttention(nn.Module):
    """Grouped-query attention with per-head Q/K norm and RoPE, causal or not, full or sliding, as configured.

    Args:
        layer_id: index of the layer, also in the drafter's KV pool.
    """

    def __init__(self, config: DrafterConfig, layer_id: int, quant_config: Any, prefix: str) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            config.head_dim,
            config.num_heads,
            config.num_kv_heads,
            bias=config.attention_bias,
            quant_config=quant_config,
            prefix=f"{prefix}.qkv_proj",
        )
        self.o_proj = RowParallelLinear(
            config.num_heads * config.head_dim,
            config.hidden_size,
            bias=config.attention_bias,
            quant_config=quant_config,
            prefix=f"{prefix}.o_proj",
        )
        self.q_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.num_heads, self.num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.attn = RadixAttention(
            self.num_heads,
            config.head_dim,
            config.head_dim**-0.5,
            self.num_kv_heads,
            layer_id=layer_id,
            sliding_window_size=window_left(config) if config.layer_types[layer_id] == SLIDING else -1,
            attn_type=AttentionType.DECODER if config.causal[layer_id] else AttentionType.ENCODER_ONLY,
        )

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Widths of this rank's Q, K and V in ``qkv_proj``'s output."""
        key_size = self.num_kv_heads * self.head_dim
        return self.num_heads * self.head_dim, key_size, key_size

    def forward(self, norm_rope: BlockNormRope, hidden: Tensor, forward_batch: Any) -> Tensor:
        """Attend from the block (``hidden`` [bs * w, H]); its K/V go to its slots."""
        qkv, _ = self.qkv_proj(hidden)
        q, k, v = norm_rope(self.attn.layer_id, qkv, self.sizes[0])
        out, _ = self.o_proj(self.attn(q, k, v, forward_batch))
        return out


def window_left(config: DrafterConfig) -> int:
    """Tokens that a sliding layer sees *before* the current one, as SGLang's backends count a window."""
    assert config.sliding_window is not None
    return config.sliding_window - 1
