"""The DFlash drafter in plain PyTorch, for training and for the reference decoder.

One pass drafts a block: queries are the embeddings of the anchor and of masks; keys and values are those of the context
and of the block. The context is the target's hidden states, projected by ``fc``, normalised, and projected by each
layer's K and V.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sglang_dflash_lab.train.dflash2 import BlockConvolution, Pick, Selector
from sglang_dflash_lab.train.hf import Qwen3MLP, Qwen3RMSNorm
from sglang_dflash_lab.train.sampling import CANDIDATES

FULL, SLIDING = "full_attention", "sliding_attention"
DFLASH2 = (  # keys of config.json; 0 or null without DFlash2's parts
    *("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
    *("output_multiplier", "final_logit_softcapping"),
)
KeyValue = tuple[Tensor, Tensor]  # keys and values, each [rows, KV heads, positions, head_dim]


@dataclass(frozen=True)
class DrafterConfig:
    """The part of ``config.json`` that shapes the drafter."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    layer_types: tuple[str, ...]
    sliding_window: int | None
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float
    eos_token_id: int

    hidden_act: str = "silu"
    conv_kernel_size: int = 0
    conv_group_size: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None

    @classmethod
    def load(cls, folder: Path) -> DrafterConfig:
        raw = json.loads((folder / "config.json").read_text())
        flat = {**raw, **raw["dflash_config"]}
        lists = {key: tuple(flat[key]) for key in ("layer_types", "target_layer_ids")}
        return cls(**{key: flat[key] for key in cls.__dataclass_fields__ if key in flat} | lists)

    def to_json(self) -> dict[str, Any]:
        """Return ``config.json`` with exactly the keys of the published drafters."""
        shape = asdict(self)
        dflash = {key: shape.pop(key) for key in ("mask_token_id", "target_layer_ids")}
        parts = {key: shape.pop(key) for key in DFLASH2}
        if self.selector_rank:
            dflash |= {"block_size": shape.pop("block_size"), **parts}
        constant = {
            "architectures": ["DFlash2DraftModel" if self.selector_rank else "DFlashDraftModel"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": None,
            "dtype": "bfloat16",
            "initializer_range": 0.02,
            "model_type": "qwen3",
            "rope_scaling": None,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_cache": True,
        }
        derived = {
            "dflash_config": dflash,
            "max_window_layers": len(self.layer_types),
            "num_hidden_layers": len(self.layer_types),
            "use_sliding_window": SLIDING in self.layer_types,
        }
        return dict(sorted({**shape, **constant, **derived}.items()))


def visible(
    layer_type: str,
    query: Tensor,
    key: Tensor,
    block_start: Tensor,
    sliding_window: int | None,
    draft_window: int | None = None,
) -> Tensor:
    """Return which keys a query may read, by absolute position; arguments broadcast.

    - A full layer reads its block and the context, or its last ``draft_window`` positions.
    - A sliding layer is causal, also inside the block, and reads ``sliding_window`` positions including its own.

    Args:
        query, key: positions, int64.
        block_start: position of the query's anchor.
    """
    if layer_type == SLIDING:
        assert sliding_window is not None
        return (key <= query) & (key > query - sliding_window)
    everything = torch.ones_like(key <= query)
    return everything if draft_window is None else everything & (key >= block_start - draft_window)


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Apply rotary embedding (neox halves) to x [rows, heads, n, head_dim] at positions [rows, n]."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = positions[:, None, :, None].float() * frequencies
    cos, sin = angles.cos(), angles.sin()
    first, second = x.float().split(half, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.head_dim, self.theta = c.head_dim, c.rope_theta
        self.q_proj = nn.Linear(c.hidden_size, c.num_attention_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = Qwen3RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(c.head_dim, c.rms_norm_eps)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def key_value(self, x: Tensor, positions: Tensor) -> KeyValue:
        keys = rotate(self.k_norm(self._heads(self.k_proj(x))), positions, self.theta)
        return keys, self._heads(self.v_proj(x))

    def forward(self, x: Tensor, positions: Tensor, context: KeyValue, mask: Tensor) -> Tensor:
        queries = rotate(self.q_norm(self._heads(self.q_proj(x))), positions, self.theta)
        keys, values = self.key_value(x, positions)
        keys, values = torch.cat((context[0], keys), dim=2), torch.cat((context[1], values), dim=2)
        out = F.scaled_dot_product_attention(
            queries, keys.to(queries.dtype), values.to(queries.dtype), attn_mask=mask, enable_gqa=True
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.attention_conv = BlockConvolution(c) if c.conv_kernel_size else None
        self.mlp_conv = BlockConvolution(c) if c.conv_kernel_size else None
        self.input_layernorm = Qwen3RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = Qwen3RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = Qwen3MLP(c)

    def forward(self, x: Tensor, positions: Tensor, context: KeyValue, mask: Tensor, width: int) -> Tensor:
        def attention(y: Tensor) -> Tensor:
            return self.self_attn(y, positions, context, mask)

        sublayers = (
            (self.input_layernorm, attention, self.attention_conv),
            (self.post_attention_layernorm, self.mlp, self.mlp_conv),
        )
        for norm, sublayer, convolution in sublayers:
            y = norm(x)
            x = x + (sublayer(y) if convolution is None else convolution(y, width, sublayer))
        return x


class Drafter(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.hidden_size * len(config.target_layer_ids), config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in config.layer_types)
        self.norm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.candidate_selector = Selector(config) if config.selector_rank else None

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype = torch.float32) -> Drafter:
        drafter = cls(DrafterConfig.load(folder))
        drafter.load_state_dict(load_file(folder / "model.safetensors"))
        return drafter.to(dtype).eval()

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: p.detach().cpu().bfloat16().contiguous() for name, p in self.state_dict().items()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "model.safetensors").chmod(0o644)  # safetensors writes 0600
        (folder / "config.json").write_text(json.dumps(self.config.to_json(), indent=2) + "\n")

    def context_key_values(self, target_hidden: Tensor, positions: Tensor) -> list[KeyValue]:
        """Return keys and values of context positions, per layer.

        Args:
            target_hidden: from :func:`context_features`, [rows, n, ids * hidden].
            positions: int64 [rows, n].
        """
        context = self.hidden_norm(self.fc(target_hidden))
        attentions = [cast(Layer, layer).self_attn for layer in self.layers]
        return [attention.key_value(context, positions) for attention in attentions]

    def forward(
        self, block: Tensor, positions: Tensor, context: list[KeyValue], masks: list[Tensor], width: int
    ) -> Tensor:
        """Return hidden states for the target's LM head, [rows, n, hidden].

        Args:
            block: the target's embeddings of one or more blocks, [rows, n, hidden].
            positions: int64 [rows, n].
            masks: per layer, bool [rows, 1, n, context + n], True if visible.
            width: positions of a block.
        """
        for layer, key_value, mask in zip(self.layers, context, masks, strict=True):
            block = layer(block, positions, key_value, mask, width)
        return self.norm(block)

    def choose(
        self, anchors: Tensor, hidden: Tensor, logits: Tensor, pick: Pick | None = None
    ) -> tuple[Tensor, Tensor]:
        """Draft a token per mask, with its lead over the second choice, as :meth:`Selector.walk`."""
        if self.candidate_selector is not None:
            return self.candidate_selector.walk(anchors, hidden, logits, pick)
        scores, ids = logits.float().topk(CANDIDATES)
        leads = scores[..., 0] - scores[..., 1]
        if pick is None:
            return logits.argmax(-1), leads
        chosen = [ids[:, i].gather(1, pick(i, ids[:, i], scores[:, i])) for i in range(ids.shape[1])]
        return torch.cat(chosen, dim=1), leads


def context_features(hidden_states: tuple[Tensor, ...], target_layer_ids: tuple[int, ...]) -> Tensor:
    """Concatenate the hidden states *after* the named 0-based layers, the drafter's input.

    Entry 0 of ``hidden_states`` is the embedding. The last is after the final norm, so the last layer cannot be named.
    """
    return torch.cat([hidden_states[i + 1] for i in target_layer_ids], dim=-1)
