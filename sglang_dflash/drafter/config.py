"""The drafter's ``config.json``, parsed strictly: a missing value is an error, never a guess.

The file is not read through transformers: its Qwen3 configuration drops ``sliding_window`` if ``use_sliding_window`` is
false, although ``layer_types`` may name sliding layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_dflash.drafter.checkpoint import ModelFiles
from sglang_dflash.drafter.dequantise import STORED, Quantised, parse, quantization
from sglang_dflash.drafter.formats import (
    ARCHITECTURES,
    INPUT_SCALE,
    MOST_POSITIONS,
    OUTPUT_SCALES,
    SLIDING,
    ConfigKeys,
    kind_left_to_builtin,
    plain_form,
    require,
    text_config,
)
from sglang_dflash.errors import DFlashError

__all__ = ["DrafterConfig", "load_config", "quantization", "text_config"]


@dataclass(frozen=True)
class DrafterConfig:
    """A drafter's configuration; every field has been checked.

    Attributes:
        block_size: tokens of one draft block, the anchor included; None if not stated.
        mask_token_id: token id of the block's positions after the anchor.
        target_layer_ids: target layers whose *output* is the drafter's input, 0-based, in ``fc``'s order.
        num_target_layers: layers of the target it was trained with; None if not stated.
        layer_types: ``full_attention`` or ``sliding_attention`` per drafter layer.
        sliding_window: tokens that a sliding layer attends to, the current one included; None without sliding layers.
        causal: per layer, whether a position of the block attends only to positions up to itself. By default
            sliding layers are causal and full layers bidirectional; ``is_causal`` sets all of them.
        rotary_dim: dimensions of a head that RoPE rotates.
        rope_scaling: parameters of a scaled RoPE (YaRN), ``rope_type`` included; None for plain RoPE.
        input_scale: factor of the block's input embeddings.
        output_scale: factor of the logits. Without a selector it changes the margins of drafts, which copies are
            compared with, not the drafts.
        conv_taps, conv_group: positions that DFlash2's convolution reads, and channels that share a correction; 0
            without the convolution.
        selector_rank, selector_top_k: columns of the codebooks of DFlash2's selector, and candidates per position; 0
            without the selector.
        logit_cap: soft cap of the scaled logits that the selector adds to; None for none.
        draft_vocab_size: number of token ids that it drafts from, marked in its tensor ``t2d``; None for all.
        copies_vocabulary: whether its tensors hold copies of the target's embedding and LM head, which are not loaded.
        dtype: name of the checkpoint's dtype; None if not stated.
        stored: quantisation of a checkpoint whose weights are dequantised; None for plain weights.
        quantization: method of a checkpoint that SGLang's quantised layers load; None for plain layers.
    """

    block_size: int | None
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    num_layers: int
    layer_types: tuple[str, ...]
    sliding_window: int | None
    causal: tuple[bool, ...]
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    attention_bias: bool
    rope_theta: float
    rotary_dim: int
    rope_scaling: Mapping[str, Any] | None
    input_scale: float
    output_scale: float
    conv_taps: int
    conv_group: int
    selector_rank: int
    selector_top_k: int
    logit_cap: float | None
    draft_vocab_size: int | None
    copies_vocabulary: bool
    dtype: str | None
    stored: Quantised | None
    quantization: str | None

    @classmethod
    def load(cls, path: str | Path) -> DrafterConfig:
        """Read a drafter's ``config.json``; errors as of :func:`load_config` and :meth:`from_dict`."""
        return cls.from_dict(load_config(path))

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> DrafterConfig:
        """Parse a drafter's configuration in any trainer's form.

        Raises:
            DFlashError: as :func:`plain_form`; the drafter is of another kind (:func:`kind_left_to_builtin`); or a key
                is unusable.
        """
        config = plain_form(config)
        if kind := kind_left_to_builtin(config):
            raise DFlashError(
                f"the drafter is of the kind {kind}",
                expected=f"a DFlash or DFlash2 drafter (architectures {', '.join(ARCHITECTURES)})",
                remedy="serve it with SGLang's own worker: set SGLANG_DFLASH=builtin",
            )
        keys = ConfigKeys(config)
        layer_types = keys.layer_types()
        is_causal = keys.is_causal()
        stored = keys.optional(STORED, Mapping, "an object")
        conv_taps, conv_group = keys.convolution() or (0, 0)
        selector_rank, selector_top_k, logit_cap = keys.selector() or (0, 0, None)
        head_dim = keys.integer("head_dim")
        rope_theta, rotary_dim, rope_scaling = keys.rope(head_dim)
        num_heads, num_kv_heads = keys.integer("num_attention_heads"), keys.integer("num_key_value_heads")
        multiple = f"a multiple of num_key_value_heads {num_kv_heads}"
        require(num_heads % num_kv_heads == 0, "num_attention_heads", num_heads, multiple)
        return cls(
            block_size=keys.optional_integer("block_size", minimum=2),
            mask_token_id=keys.integer("mask_token_id", minimum=0),  # a token's name would need a tokenizer
            target_layer_ids=keys.target_layer_ids(),
            num_target_layers=keys.optional_integer("num_target_layers"),
            num_layers=len(layer_types),
            layer_types=layer_types,
            sliding_window=keys.integer("sliding_window") if SLIDING in layer_types else None,
            causal=tuple(kind == SLIDING if is_causal is None else is_causal for kind in layer_types),
            hidden_size=keys.integer("hidden_size"),
            intermediate_size=keys.integer("intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            vocab_size=keys.integer("vocab_size"),
            max_position_embeddings=keys.integer("max_position_embeddings", maximum=MOST_POSITIONS),
            rms_norm_eps=keys.number("rms_norm_eps"),
            attention_bias=bool(keys.boolean("attention_bias")),
            rope_theta=rope_theta,
            rotary_dim=rotary_dim,
            rope_scaling=rope_scaling,
            input_scale=keys.factor(INPUT_SCALE),
            output_scale=math.prod(map(keys.factor, OUTPUT_SCALES)),
            conv_taps=conv_taps,
            conv_group=conv_group,
            selector_rank=selector_rank,
            selector_top_k=selector_top_k,
            logit_cap=logit_cap,
            draft_vocab_size=keys.draft_vocab_size(),
            copies_vocabulary=bool(keys.boolean("copies_vocabulary")),
            dtype=keys.optional("dtype", str, "a name") or keys.optional("torch_dtype", str, "a name"),
            stored=None if stored is None else parse(stored),
            quantization=quantization(config),
        )


def load_config(path: str | Path) -> dict[str, Any]:
    """Read a model's ``config.json`` as its trainer wrote it; errors as of :attr:`ModelFiles.published`."""
    return ModelFiles(str(path)).published
