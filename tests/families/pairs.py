"""Tiny random targets of every family, made with transformers in a second, and a random drafter for each.

transformers renames or drops some keys of published configurations, which SGLang reads: each row restores them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

from sglang_dflash.drafter.formats import text_config
from sglang_dflash_lab.pairs import target_path
from tests.support.checkpoints import write_drafter
from tests.support.files import load_config

VOCAB, WINDOW = 512, 32
SPECIAL = ("image", "boi", "eoi", "audio", "boa", "eoa")
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "max_position_embeddings": 4096,
}  # fmt: skip
_COMMON: dict[str, Any] = {
    **_SIZES, "num_hidden_layers": 4, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
_SLIDING, _FULL = "sliding_attention", "full_attention"
_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "routed_scaling_factor": 1.5, "first_k_dense_replace": 1, "norm_topk_prob": True,
}  # fmt: skip
# SGLang's Triton kernels divide a latent row of 288 or 576
_MLA: dict[str, Any] = {
    **_EXPERTS, "q_lora_rank": 32, "kv_lora_rank": 256, "qk_nope_head_dim": 16, "qk_rope_head_dim": 32,
    "v_head_dim": 16, "num_key_value_heads": 4,
}  # fmt: skip
_SIGMOID = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
_DEEPSEEK = {**_MLA, "n_group": 2, "head_dim": 32}
_FEW = {"num_local_experts": 8, "num_experts_per_tok": 2}
_GPT_OSS: dict[str, Any] = {
    **_FEW, "intermediate_size": 64, "layer_types": [_SLIDING, _FULL] * 2, "sliding_window": WINDOW,
    "attention_bias": True, "swiglu_limit": 7.0,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "original_max_position_embeddings": 128, "truncate": False,
    },
}  # fmt: skip
_GEMMA: dict[str, Any] = {
    "vocab_size": 1024, "vocab_size_per_layer_input": 1024, "num_hidden_layers": 6, "sliding_window": WINDOW,
    "layer_types": [_SLIDING, _SLIDING, _FULL] * 2, "global_head_dim": 32, "num_global_key_value_heads": 1,
    "attention_k_eq_v": True, "enable_moe_block": False, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
    "final_logit_softcapping": 30.0, "tie_word_embeddings": True, "dtype": "float32",
    "rope_parameters": {
        _SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
        _FULL: {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25},
    },
}  # fmt: skip
_GEMMA_EXPERTS = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32}
_GEMMA_SHARED = {"hidden_size_per_layer_input": 16, "attention_k_eq_v": False, "num_kv_shared_layers": 3}
_GEMMA_SHARED |= {"num_global_key_value_heads": None}
_HEADS = {"per_layer_config": None, "global_head_dim": 32}
_KEYS_ARE_VALUES = {**_HEADS, "num_global_key_value_heads": 1}
_VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16,
    "num_key_value_heads": 2, "global_head_dim": 16, "pooling_kernel_size": 3, "patch_size": 16,
    "position_embedding_size": 256,
}  # fmt: skip
_MINIMAX = {"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer"}


class Target(NamedTuple):
    """A target: the stem of its classes in transformers, its keys, and keys of its config.json; None removes one."""

    stem: str
    keys: Mapping[str, Any] = {}
    published: Mapping[str, Any] = {}


# By model type of the text configuration, and a variant
TARGETS = {
    "llama": Target("Llama"),
    "qwen2": Target("Qwen2"),
    "qwen3_moe": Target("Qwen3Moe", {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    "mistral": Target("Mistral", {"sliding_window": None}),
    "ministral3": Target("Ministral3", {"sliding_window": None}),
    "glm4": Target("Glm4"),
    "glm4_moe": Target("Glm4Moe", {**_EXPERTS, "use_qk_norm": True, "partial_rotary_factor": 0.5}),
    "minimax_m2": Target(
        "MiniMaxM2", {**_FEW, "intermediate_size": 32, "rotary_dim": 8}, {**_MINIMAX, "rotary_dim": 8}
    ),
    "gpt_oss": Target("GptOss", _GPT_OSS),
    "gemma4_text": Target("Gemma4", _GEMMA, _KEYS_ARE_VALUES),
    "gemma4_text of experts": Target("Gemma4", {**_GEMMA, **_GEMMA_EXPERTS}, _KEYS_ARE_VALUES),
    "gemma4_text with shared K/V": Target("Gemma4", {**_GEMMA, **_GEMMA_SHARED}, _HEADS),
    "deepseek_v3": Target("DeepseekV3", _DEEPSEEK, _SIGMOID),
    "kimi_k2": Target("DeepseekV3", _DEEPSEEK, {**_SIGMOID, "model_type": "kimi_k2"}),
    "glm4_moe_lite": Target("Glm4MoeLite", {**_MLA, "rms_norm_eps": 1e-6}, _SIGMOID),
}


@dataclass(frozen=True)
class Pair:
    """A target in transformers, float32, and the layers that its drafter reads."""

    model: transformers.PreTrainedModel
    layers: tuple[int, ...]

    def read(self, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """Return the logits ``[tokens, V]``, and the outputs of the drafter's layers ``[tokens, layers * H]``."""
        with torch.inference_mode():
            out = self.model(input_ids=torch.tensor([tokens]), output_hidden_states=True)
        return out.logits[0], torch.cat([out.hidden_states[layer + 1][0] for layer in self.layers], -1)


def build(name: str, folder: Path) -> Pair:
    """Write ``folder/target`` and ``folder/drafter``."""
    target = TARGETS[name]
    torch.manual_seed(0)
    model = spread_weights(_gemma(target) if target.stem == "Gemma4" else _text(target))
    model.save_pretrained(folder / "target")
    if target.stem == "Gemma4":
        _processor().save_pretrained(folder / "target")
    config = load_config(folder / "target")
    text = text_config(config)
    text.update(target.published)
    for key in [key for key, value in text.items() if value is None and key in target.published]:
        del text[key]
    assert text["model_type"] == name.split()[0]
    (folder / "target" / "config.json").write_text(json.dumps(config))
    layers = (0, 1, text["num_hidden_layers"] - 2)
    sizes = {**_SIZES, "vocab_size": text["vocab_size"], "mask_token_id": text["vocab_size"] - 1, "eos_token_id": 1}
    of_target = {"target_layer_ids": layers, "num_target_layers": text["num_hidden_layers"]}
    write_drafter(folder / "drafter", **sizes, **of_target, layer_types=(_SLIDING, _FULL), sliding_window=64)
    return Pair(model, layers)


def _text(target: Target) -> transformers.PreTrainedModel:
    config = getattr(transformers, f"{target.stem}Config")(**{**_COMMON, **target.keys})
    model = getattr(transformers, f"{target.stem}ForCausalLM")(config)
    # SGLang reads the epsilon of every norm from the configuration; transformers has 1e-6 in MLA, fixed
    eps = config.rms_norm_eps
    assert {norm.variance_epsilon for norm in model.modules() if hasattr(norm, "variance_epsilon")} == {eps}
    return model


def _gemma(target: Target) -> transformers.PreTrainedModel:
    """SGLang reads no text-only Gemma 4."""
    text = {**_COMMON, **target.keys}
    ids = {f"{name}_token_id": text["vocab_size"] + place for place, name in enumerate((*SPECIAL, "video"))}
    ids["eoa_token_index"] = ids.pop("eoa_token_id")
    config = transformers.Gemma4Config(text_config=text, vision_config=_VISION, audio_config=None, **ids)
    return transformers.Gemma4ForConditionalGeneration(config)


def _processor() -> transformers.ProcessorMixin:
    tokens = {f"{name}_token": f"<|{name}|>" for name in SPECIAL}
    tokenizer = transformers.AutoTokenizer.from_pretrained(target_path("tiny-dense"), extra_special_tokens=tokens)
    parts = transformers.Gemma4AudioFeatureExtractor(), transformers.Gemma4ImageProcessor()
    return transformers.Gemma4Processor(*parts, tokenizer, transformers.Gemma4VideoProcessor())


def spread_weights(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """Draw weights wider than the usual initialisation, and those that transformers sets to zero or one."""
    drawn = {
        "sinks": lambda weight: weight.copy_(torch.randn_like(weight).bfloat16()),  # SGLang stores them so
        "A_log": lambda weight: weight.uniform_(0.0, 1.5),
        "dt_bias": lambda weight: weight.uniform_(-1.0, 1.0),
        ".D": lambda weight: weight.normal_(1, 0.3),
        "conv1d.weight": lambda weight: weight.normal_(0, 0.3),
        "norm.weight": lambda weight: weight.add_(torch.randn_like(weight) * 0.1),
        "scale": lambda weight: weight.uniform_(0.5, 1.5),
        "bias": lambda weight: weight.normal_(0, 0.05),
        "": lambda weight: weight.normal_(0, 0.08) if weight.ndim > 1 else None,
    }
    torch.manual_seed(1)
    with torch.no_grad():
        biases = [each for each in model.named_buffers() if "e_score_correction_bias" in each[0]]
        for name, weight in [*model.named_parameters(), *biases]:
            next(draw for end, draw in drawn.items() if name.endswith(end))(weight)
    return model.float().eval()
