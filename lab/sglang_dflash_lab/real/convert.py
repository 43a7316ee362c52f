"""Convert a Llama model from GGUF to a folder that SGLang serves: bfloat16 weights and the tokenizer.

This module adds what transformers drops: the split rule before BPE (``tokenizer.ggml.pre``) and the context length.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import typer
from gguf import GGUFReader
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.quantization_config import GgufConfig

from sglang_dflash.check import user_errors
from sglang_dflash.errors import DFlashError


def convert(file: Path, folder: Path) -> None:
    """Write the model of a GGUF file to ``folder``; an interrupted conversion leaves no folder.

    Raises:
        DFlashError: the file's tokenizer has an unknown split rule.
    """
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    tokenizer = _tokenizer(file)
    dequantised = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, quantization_config=dequantised, dtype=torch.bfloat16
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def _tokenizer(file: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    rule = GGUFReader(file).fields["tokenizer.ggml.pre"].contents()
    if rule != "smollm":
        raise DFlashError(
            f"{file} has tokenizer.ggml.pre {rule!r}, not 'smollm'", remedy="add that rule to this module"
        )
    # Each digit is a token, so the spaces before a number stay together.
    digits = pre_tokenizers.Digits(individual_digits=True)
    rest = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, rest])
    return tokenizer


def main(file: Path, folder: Path) -> None:
    """Convert the model of a GGUF FILE to a FOLDER that SGLang serves."""
    with user_errors():
        convert(file, folder)


if __name__ == "__main__":
    typer.run(main)
