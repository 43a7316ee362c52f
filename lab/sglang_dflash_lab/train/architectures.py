"""The targets: shapes of the published pairs, a thousand times smaller, divisible for TP=2."""

from __future__ import annotations

from typing import Any

import torch

from sglang_dflash_lab.train.hf import transformers

MAX_POSITIONS = 8192
ROPE_THETA = 10000.0
EMBEDDING_STD = 0.1
_COMMON: dict[str, Any] = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 384,
    "tie_word_embeddings": True,
    "max_position_embeddings": MAX_POSITIONS,
    "rms_norm_eps": 1e-6,
}
_HYBRID: dict[str, Any] = {
    "num_hidden_layers": 8,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": ROPE_THETA,
        "partial_rotary_factor": 0.25,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 128,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


_DENSE = {"num_hidden_layers": 6, "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA}}
_MODELS = {
    "tiny-hybrid": ("qwen3_5_text", _HYBRID),
    "tiny-moe": ("qwen3_5_moe_text", {**_HYBRID, **_EXPERTS}),
    "tiny-dense": ("qwen3", _DENSE),
    "tiny-forks": ("qwen3", _DENSE),
}


def build_target(name: str, tokenizer: transformers.PreTrainedTokenizerFast) -> transformers.PreTrainedModel:
    model_type, shape = _MODELS[name]
    config = transformers.AutoConfig.for_model(
        model_type,
        **_COMMON,
        **shape,
        vocab_size=-(-len(tokenizer) // 64) * 64,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    # With 0.02, embeddings of a word class collapse, which delays copying by thousands of steps.
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=EMBEDDING_STD)
    return model
