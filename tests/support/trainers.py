"""Tiny checkpoints as other trainers write them, from the fixtures' keys and tensor names; and the plain way."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.configs import drafter, write_model

FOLDER = Path(__file__).parents[1] / "fixtures" / "trainers"
FULL, SLIDING = "full_attention", "sliding_attention"
_YARN = {"type": "yarn", "factor": 48.0, "original_max_position_embeddings": 4096, "beta_fast": 1.0, "beta_slow": 1.0}
_YARN |= {"mscale": 1.0, "mscale_all_dim": 1.0}

# The drafter that all fixtures describe, in z-lab's keys, and what is different in each.
_PLAIN = drafter(target_layer_ids=[1, 3, 5], attention_bias=False, dtype="bfloat16", rope_theta=1e6)
_PLAIN |= {"layer_types": [FULL, FULL], "sliding_window": None}
_TWO_TAPS = {"block_size": 8, "dflash_config": {"mask_token_id": 900, "target_layer_ids": [1, 5]}}
_SLIDING = {"layer_types": [SLIDING, SLIDING], "sliding_window": 2048, "is_causal": False}
_PARTS = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 4}
_DFLASH2: dict[str, Any] = {"architectures": ["DFlash2DraftModel"], "is_causal": False}
_DFLASH2 |= {"dflash_config": {**_PLAIN["dflash_config"], **_PARTS}}
SERVED: dict[str, dict[str, Any]] = {
    "specforge": {"layer_types": [SLIDING, FULL], "sliding_window": 2048, "rope_theta": 1e7},
    "speculators": {"block_size": 8, "num_target_layers": None},
    "speculators-reduced": {**_SLIDING, "block_size": 8, "num_target_layers": None, "layer_types": [SLIDING, FULL]},
    "speculators-dflash2": {**_DFLASH2, "block_size": 8, "num_target_layers": None},
    "automodel-dflash2": {**_SLIDING, **_DFLASH2},
    "automodel": {"is_causal": False},
    "automodel-window": _SLIDING,
    "automodel-jetspec": {"is_causal": True},
    "modelopt": {**_TWO_TAPS, "rope_scaling": _YARN},
    "modelopt-window": {**_TWO_TAPS, **_SLIDING},
}


def config(name: str) -> dict[str, Any]:
    """The fixture's ``config.json``."""
    found: dict[str, Any] = json.loads((FOLDER / name / "config.json").read_text())
    return found


def plain_config(name: str) -> dict[str, Any]:
    """The same drafter in z-lab's keys."""
    return {**copy.deepcopy(_PLAIN), **copy.deepcopy(SERVED[name])}


def write_target(folder: Path, *, tied: bool = False) -> dict[str, Tensor]:
    """A target's configuration and vocabulary: 1024 tokens of width 64."""
    tensors = {"model.embed_tokens.weight": _random(1024, 64, seed=1)}
    if not tied:
        tensors["lm_head.weight"] = _random(1024, 64, seed=2)
    write_model(folder, {"tie_word_embeddings": tied, "vocab_size": 1024}, tensors)
    return tensors


def tensors_of(name: str, target: dict[str, Tensor]) -> dict[str, Tensor]:
    """Random tensors with the fixture's names, shapes and dtypes; its vocabulary is a copy of the target's."""
    header: dict[str, tuple[str, list[int]]] = json.loads((FOLDER / name / "tensors.json").read_text())
    shapes = {key: shape for key, (dtype, shape) in header.items() if dtype == "BF16"}
    tensors = {key: _random(*shape, seed=seed) for seed, (key, shape) in enumerate(sorted(shapes.items()), 10)}
    embedding = target["model.embed_tokens.weight"]
    ids = torch.arange(embedding.shape[0])
    if "t2d" in header:
        drafted = torch.randperm(len(ids), generator=torch.Generator().manual_seed(3)) < header["d2t"][1][0]
        ids = drafted.nonzero().flatten()
        tensors |= {"t2d": drafted, "d2t": ids - torch.arange(len(ids))}
    if "embed_tokens.weight" in header:
        tensors["embed_tokens.weight"] = embedding.clone()
        tensors["lm_head.weight"] = target.get("lm_head.weight", embedding)[ids]
    assert {key: list(tensor.shape) for key, tensor in tensors.items()} == {key: h[1] for key, h in header.items()}
    return tensors


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
