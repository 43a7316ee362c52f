"""transformers, importable with a CPU build of PyTorch (:mod:`sglang_dflash_cpu.torchvision_import`)."""

from __future__ import annotations

from pathlib import Path

import torch

from sglang_dflash_cpu import torchvision_import

torchvision_import.install()

import transformers  # noqa: E402
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm  # noqa: E402

__all__ = ["Qwen3MLP", "Qwen3RMSNorm", "load_model", "load_tokenizer", "transformers"]


def load_model(folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()


def load_tokenizer(folder: Path) -> transformers.PreTrainedTokenizerFast:
    return transformers.AutoTokenizer.from_pretrained(folder)
