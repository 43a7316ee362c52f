"""Tiny random targets of every family, made with transformers in a second, and a random drafter for each.

transformers renames or drops some keys of published configurations, which SGLang reads: each row restores them.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from sglang_dflash.drafter.config import DrafterConfig, load_config, text_config
from sglang_dflash.drafter.tensors import expected_shapes
from sglang_dflash_lab.pairs import target_path
from tests.support.configs import write_model

VOCAB, WINDOW = 512, 32
SPECIAL = {f"{name}_token": f"<|{name}|>" for name in ("image", "boi", "eoi", "audio", "boa", "eoa")}
IMAGE_IDS = {
    f"{name}_token_id": 1024 + place for place, name in enumerate(("image", "boi", "eoi", "audio", "boa", "eoa"))
}
_ALTERNATE = ["sliding_attention", "full_attention"]
_COMMON: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096},
    **{"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "tie_word_embeddings": False},
}
_EXPERTS: dict[str, Any] = {
    **{"moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    **{"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5, "first_k_dense_replace": 1, "norm_topk_prob": True},
}
_MLA: dict[str, Any] = {
    **_EXPERTS,
    **{"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    "num_key_value_heads": 4,
}
_SIGMOID = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
_DEEPSEEK = {**_MLA, "n_group": 2, "head_dim": 8}
_FEW_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
_YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
_YARN |= {"original_max_position_embeddings": 128, "truncate": False}
_GEMMA: dict[str, Any] = {
    **{"num_hidden_layers": 6, "layer_types": [*_ALTERNATE[:1] * 2, *_ALTERNATE[1:]] * 2, "sliding_window": WINDOW},
    **{"global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "enable_moe_block": False},
    **{"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "final_logit_softcapping": 30.0},
    **{"tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh", "vocab_size": 1024, "dtype": "float32"},
    "vocab_size_per_layer_input": 1024,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25},
    },
}
_OWN_KV = {"hidden_size_per_layer_input": 16, "attention_k_eq_v": False, "num_kv_shared_layers": 3}
_HEADS = {"per_layer_config": None, "global_head_dim": 32}
_GEMMA_PUBLISHED = {**_HEADS, "num_global_key_value_heads": 1}
_VISION: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16},
    **{"num_key_value_heads": 2, "global_head_dim": 16, "pooling_kernel_size": 3, "patch_size": 16},
    "position_embedding_size": 256,
}
_PATTERN = "M-M*M-"
_MAMBA = {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "conv_kernel": 4}
_MAMBA |= {"chunk_size": 64, "mamba_hidden_act": "silu", "mlp_hidden_act": "relu2", "expand": 2}


class Target(NamedTuple):
    """A target: the stem of its classes in transformers, its keys, and keys of its config.json; None removes one."""

    stem: str
    keys: Mapping[str, Any] = {}
    published: Mapping[str, Any] = {}


# By model type of the text configuration, and a variant
TARGETS = {
    "llama": Target("Llama"),
    "qwen2": Target("Qwen2"),
    "qwen3": Target("Qwen3"),
    "qwen3_moe": Target("Qwen3Moe", {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    "mistral": Target("Mistral", {"sliding_window": None}),
    "ministral3": Target("Ministral3", {"sliding_window": None}),
    "glm4": Target("Glm4"),
    "glm4_moe": Target("Glm4Moe", {**_EXPERTS, "use_qk_norm": True, "partial_rotary_factor": 0.5}),
    "minimax_m2": Target(
        "MiniMaxM2",
        {**_FEW_EXPERTS, "intermediate_size": 32, "rotary_dim": 8},
        {"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer"}
        | {"rotary_dim": 8},
    ),
    "gpt_oss": Target(
        "GptOss",
        {**_FEW_EXPERTS, "intermediate_size": 64, "layer_types": _ALTERNATE * 2, "sliding_window": WINDOW}
        | {"attention_bias": True, "swiglu_limit": 7.0, "rope_parameters": _YARN},
    ),
    "gemma4_text": Target("Gemma4", _GEMMA, _GEMMA_PUBLISHED),
    "gemma4_text of experts": Target(
        "Gemma4",
        {**_GEMMA, "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32},
        _GEMMA_PUBLISHED,
    ),
    "gemma4_text with shared K/V": Target("Gemma4", {**_GEMMA, **_OWN_KV, "num_global_key_value_heads": None}, _HEADS),
    "deepseek_v3": Target("DeepseekV3", _DEEPSEEK, _SIGMOID),
    "kimi_k2": Target("DeepseekV3", _DEEPSEEK, {**_SIGMOID, "model_type": "kimi_k2"}),
    "glm4_moe_lite": Target("Glm4MoeLite", _MLA, _SIGMOID),
    "nemotron_h": Target(
        "NemotronH",
        {**_MAMBA, "num_hidden_layers": len(_PATTERN), "hybrid_override_pattern": _PATTERN},
        {"layers_block_type": None, "layer_types": None, "hybrid_override_pattern": _PATTERN}
        | {"num_hidden_layers": len(_PATTERN), "mamba_n_groups": 2},
    ),
}


@dataclass(frozen=True)
class Pair:
    """A target in transformers, float32, and its folder, which has ``target`` and ``drafter``."""

    model: transformers.PreTrainedModel
    folder: Path

    @cached_property
    def layers(self) -> list[int]:
        """Return the layers that the drafter reads."""
        return list(load_config(self.folder / "drafter")["dflash_config"]["target_layer_ids"])

    def read(self, tokens: list[int], **inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits ``[tokens, V]``, and the outputs of the drafter's layers ``[tokens, layers * H]``."""
        with torch.inference_mode():
            out = self.model(input_ids=torch.tensor([tokens]), output_hidden_states=True, **inputs)
        return out.logits[0], torch.cat([out.hidden_states[layer + 1][0] for layer in self.layers], -1)


def build(name: str, folder: Path, **drafter: Any) -> Pair:
    """Write the pair, with changed keys of the drafter's configuration."""
    target = TARGETS[name]
    torch.manual_seed(0)
    model = spread_weights(_with_vision(target) if target.stem == "Gemma4" else _text(target))
    model.save_pretrained(folder / "target")
    if target.stem == "Gemma4":
        _processor().save_pretrained(folder / "target")
    config = load_config(folder / "target")
    text = text_config(config)
    text.update(target.published)
    assert text["model_type"] == name.split()[0]
    for key in [key for key, value in target.published.items() if value is None]:
        text.pop(key)
    (folder / "target" / "config.json").write_text(json.dumps(config))
    write_drafter(folder / "drafter", text, **drafter)
    return Pair(model, folder)


def _text(target: Target) -> transformers.PreTrainedModel:
    config = getattr(transformers, f"{target.stem}Config")(**{**_COMMON, **target.keys})
    return getattr(transformers, f"{target.stem}ForCausalLM")(config)


def _with_vision(target: Target) -> transformers.PreTrainedModel:
    text = {**_COMMON, **target.keys}
    ids = {**IMAGE_IDS, "eoa_token_index": IMAGE_IDS["eoa_token_id"], "video_token_id": 1030}
    config = transformers.Gemma4Config(text_config=text, vision_config=_VISION, audio_config=None, **ids)
    return transformers.Gemma4ForConditionalGeneration(config)


def _processor() -> transformers.ProcessorMixin:
    """Build the processor that SGLang requires of a target with images."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(target_path("tiny-dense"), extra_special_tokens=SPECIAL)
    parts = transformers.Gemma4AudioFeatureExtractor(), transformers.Gemma4ImageProcessor()
    return transformers.Gemma4Processor(*parts, tokenizer, transformers.Gemma4VideoProcessor())


def spread_weights(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """Draw weights wider than the usual initialisation, and those that transformers sets to zero or one."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            if "e_score_correction_bias" in name or name.endswith("bias") and weight.ndim == 1 and "dt_" not in name:
                weight.normal_(0, 0.05)
            elif "sinks" in name:
                weight.copy_(torch.randn_like(weight).bfloat16())  # SGLang stores them so
            elif name.endswith("A_log"):
                weight.uniform_(0.0, 1.5)
            elif name.endswith("dt_bias"):
                weight.uniform_(-1.0, 1.0)
            elif name.endswith(".D"):
                weight.normal_(1, 0.3)
            elif isinstance(weight, torch.nn.Parameter) and weight.ndim >= 2:
                weight.normal_(0, 0.3 if "conv1d" in name else 0.08)
            elif isinstance(weight, torch.nn.Parameter) and "norm" in name:
                weight.add_(torch.randn_like(weight) * 0.1)
    return model.float().eval()


def write_drafter(folder: Path, target: Mapping[str, Any], **changes: Any) -> None:
    """Write a random drafter for a target's text configuration."""
    layers, vocab = target["num_hidden_layers"], target["vocab_size"]
    config = {
        **{"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": 16, "num_hidden_layers": 2},
        **{
            key: _COMMON[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
        },
        **{"hidden_size": target["hidden_size"], "vocab_size": vocab, "num_target_layers": layers, "dtype": "float32"},
        **{"max_position_embeddings": 4096, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0},
        **{"layer_types": _ALTERNATE, "sliding_window": 64, "use_sliding_window": True, "attention_bias": False},
        **{"dflash_config": {"mask_token_id": vocab - 1, "target_layer_ids": [0, 1, layers - 2]}, **changes},
    }
    torch.manual_seed(2)
    shapes = expected_shapes(DrafterConfig.from_dict(config))
    weights = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * 0.08 for name, shape in shapes.items()
    }
    write_model(folder, config, weights)


def write_adapter(model: transformers.PreTrainedModel, folder: Path) -> transformers.PreTrainedModel:
    """Write a random LoRA adapter of the attention's projections in PEFT's format; return the model merged with it."""
    modules, tensors, draw = ("q_proj", "v_proj", "o_proj"), {}, torch.Generator().manual_seed(3)
    merged = copy.deepcopy(model)
    for name, module in merged.named_modules():
        if name.endswith(modules) and "vision" not in name:
            outputs, inputs = module.weight.shape
            a, b = (torch.randn(*shape, generator=draw) * 0.1 for shape in ((4, inputs), (outputs, 4)))
            module.weight.data += b @ a
            tensors |= {f"base_model.model.{name}.lora_{part}.weight": each for part, each in (("A", a), ("B", b))}
    targets = sorted({name.split(".")[-3] for name in tensors})
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": targets, "bias": "none"}
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return merged
