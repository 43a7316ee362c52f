"""Tiny random fp32 checkpoints of the four target architectures, and the reference they are held to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from sglang_dflash_lab.pairs import target_path

VOCAB_SIZE = 512
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
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
MROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    }
}
_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 128,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [],
}
HYBRIDS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
ARCHITECTURES = ("qwen3", *HYBRIDS)


def build(name: str, vocab_size: int = VOCAB_SIZE) -> transformers.PreTrainedModel:
    """A random model, in fp32, whose largest logit is rarely in doubt."""
    torch.manual_seed(0)
    common = {**_COMMON, "vocab_size": vocab_size}
    config: transformers.PreTrainedConfig
    if name == "qwen3":
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**common))
    elif name == "qwen3_next":
        config = transformers.Qwen3NextConfig(**common, **GDN, **EXPERTS, partial_rotary_factor=0.25)
        model = transformers.Qwen3NextForCausalLM(config)
    elif name == "qwen3_5":
        model = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**common, **GDN, **MROPE))
    elif name == "qwen3_5_moe":
        config = transformers.Qwen3_5MoeTextConfig(**common, **GDN, **EXPERTS, **MROPE)
        model = transformers.Qwen3_5MoeForCausalLM(config)
    elif name == "qwen3_5_vision":
        config = transformers.Qwen3_5Config(
            text_config={**common, **GDN, **MROPE}, vision_config=_VISION, tie_word_embeddings=False
        )
        model = transformers.Qwen3_5ForConditionalGeneration(config)
    else:
        raise ValueError(f"no tiny checkpoint named {name!r}")
    spread_weights(model)
    return model.float().eval()


def spread_weights(model: torch.nn.Module) -> None:
    """Wider than the usual initialisation: activations that matter, decays and gates away from their limits."""
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


def assert_greedy(model: transformers.PreTrainedModel, prompt: list[int], output: list[int]) -> None:
    """Every token of ``output`` is the argmax of the model over everything before it.

    By induction this is token-for-token equality with the model's own greedy decoding, for one forward pass.
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


def processor() -> transformers.ProcessorMixin:
    """What SGLang loads for a multimodal architecture whether or not an image ever comes."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(target_path("tiny-hybrid"))
    image, video = transformers.Qwen2VLImageProcessor(), transformers.Qwen3VLVideoProcessor()
    return transformers.Qwen3VLProcessor(image, tokenizer, video)


class Checkpoints:
    """Builds each model once, saves it under ``folder`` and keeps it as the reference."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._models: dict[str, transformers.PreTrainedModel] = {}

    def model(self, name: str) -> transformers.PreTrainedModel:
        if name not in self._models:
            self._models[name] = build(name)
            self._models[name].save_pretrained(self.path(name))
            if name == "qwen3_5_vision":
                processor().save_pretrained(self.path(name))
        return self._models[name]

    def path(self, name: str) -> Path:
        return self.folder / name
