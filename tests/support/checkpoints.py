"""Tiny checkpoints: random targets and drafters, changed copies of a target; greedy tokens of a model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from sglang_dflash_lab.pairs import drafter_path
from sglang_dflash_lab.train.drafter import Drafter, DrafterConfig
from tests.support.configs import write_model

COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
GDN: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "full_attention_interval": 2,
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_interleaved": True}
MROPE = {"rope_parameters": {**_ROPE, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}}


def build(**changes: Any) -> transformers.PreTrainedModel:
    """Return a random hybrid fp32 model whose largest logit is rarely in doubt; ``changes`` of its configuration."""
    torch.manual_seed(0)
    config = transformers.Qwen3_5TextConfig(**{**COMMON, **GDN, **MROPE, **changes})
    return spread_weights(transformers.Qwen3_5ForCausalLM(config))


def spread_weights(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """Draw weights wider than the usual initialisation: activations that matter, decays and gates off their limits."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "conv1d" in name:
                parameter.normal_(0, 0.3)
            elif parameter.ndim >= 2:
                parameter.normal_(0, 0.08)
            elif name.endswith("A_log"):
                parameter.uniform_(0.0, 1.5)
            elif name.endswith("dt_bias"):
                parameter.uniform_(-1.0, 1.0)
    return model.float().eval()


def copy_of(target: Path, folder: Path, tensors: Mapping[str, Tensor], **config: Any) -> Path:
    """Copy a target, with changed keys of its configuration and changed or added tensors."""
    shutil.copytree(target, folder)
    keys, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    return write_model(folder, {**keys, **config}, {**weights, **tensors})


def widen_mlp(target: Path, folder: Path) -> Path:
    """Copy a target with an MLP of four times the neurons, which computes the same function up to rounding."""
    wide = {}
    for name, weight in load_file(target / "model.safetensors").items():
        if "mlp" in name:  # parts of a neuron's output, exact in any dtype
            parts, axis = ((1 / 2, 1 / 4, 1 / 8, 1 / 8), 1) if "down_proj" in name else ((1, 1, 1, 1), 0)
            wide[name] = torch.cat([weight * part for part in parts], axis)
    size = json.loads((target / "config.json").read_text())["intermediate_size"]
    return copy_of(target, folder, wide, intermediate_size=4 * size)


def untie(target: Path, folder: Path) -> Path:
    """Copy a target, with the embedding's weights in a separate LM head."""
    weights = load_file(target / "model.safetensors")
    [embedding] = (weight for name, weight in weights.items() if name.endswith("embed_tokens.weight"))
    return copy_of(target, folder, {"lm_head.weight": embedding.clone()}, tie_word_embeddings=False)


def write_drafter(folder: Path, **fields: Any) -> Drafter:
    """Write a drafter with strong attention, convolutions and selector: a fault in one of them changes its drafts.

    Args:
        fields: changes to the configuration of ``tiny-dense``'s.
    """
    torch.manual_seed(0)
    drafter = Drafter(replace(DrafterConfig.load(drafter_path("tiny-dense")), **fields))
    with torch.no_grad():
        for name, weight in drafter.named_parameters():
            if name.endswith("o_proj.weight"):
                weight.mul_(20)
            elif name.endswith("q_norm.weight"):
                weight.mul_(4)
            elif name.endswith(("kernel_projection.weight", "base_kernel", "successor_codebook")):
                weight.add_(torch.randn_like(weight) * (0.05 if "kernel_projection" in name else 0.5))
    drafter.save(folder)
    return Drafter.load(folder)  # rounded as on disk


def assert_greedy(model: transformers.PreTrainedModel, prompt: list[int], output: list[int]) -> None:
    """Assert that every token of ``output`` is the model's argmax after all tokens before it.

    By induction this is token-for-token equality with the model's greedy decoding, for one forward pass.
    """
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
    top = logits.topk(2)
    for step, token in enumerate(output):
        best, margin = int(top.indices[step, 0]), float(top.values[step, 0] - top.values[step, 1])
        assert token == best, (
            f"prompt of {len(prompt)} tokens, new token {step}: got {token}, reference {best} "
            f"(leads its second choice {int(top.indices[step, 1])} by {margin:.2e})"
        )
