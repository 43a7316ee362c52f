"""A shipped drafter in FP8 with one factor per block of weights, and the plain drafter that it stands for."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import pad

from sglang_dflash_lab.pairs import drafter_path
from tests.support.configs import write_model

BLOCK = 128
DECLARED = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}


def write_quantised(folder: Path, pair: str = "tiny-dense", *, whole: bool = False) -> None:
    """Write ``folder/quantised`` and ``folder/plain``. With ``whole``, a tensor has one factor."""
    block = 4096 if whole else BLOCK
    source, stored, plain = drafter_path(pair), dict[str, Tensor](), dict[str, Tensor]()
    for name, weight in load_file(source / "model.safetensors").items():
        stored[name] = plain[name] = weight
        if weight.ndim == 2:
            rows, columns = weight.shape
            padded = pad(weight.float(), (0, -columns % block, 0, -rows % block))
            scale = padded.unflatten(1, (-1, block)).unflatten(0, (-1, block)).abs().amax((1, 3)) / 448
            factors = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)[:rows, :columns]
            stored[name] = (weight.float() / factors).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scale.reshape(()) if whole else scale
            plain[name] = stored[name].float() * factors
    config = json.loads((source / "config.json").read_text())
    for kind, tensors, extra in (("quantised", stored, {"quantization_config": DECLARED}), ("plain", plain, {})):
        write_model(folder / kind, {**config, **extra}, tensors)
