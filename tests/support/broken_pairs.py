"""Pairs and flags that cannot work, each broken in one place, and a pair that fits to start from."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from sglang_dflash.drafter.config import DrafterConfig
from sglang_dflash.drafter.tensors import expected_shapes
from tests.support.configs import MISSING, drafter, target, write_model


@dataclass(frozen=True)
class Broken:
    """One fault: changed keys, extra server flags, or changed files.

    Attributes:
        name: of the fault.
        names: words that its error must contain.
        files: text by path; None removes the file.
        tensors: shapes of the drafter's that differ; None drops one.
    """

    name: str
    names: str
    drafter: dict[str, Any] = field(default_factory=dict)
    target: dict[str, Any] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    files: dict[str, str | None] = field(default_factory=dict)
    tensors: dict[str, tuple[int, ...] | None] = field(default_factory=dict)


def write_pair(folder: Path, broken: Broken) -> None:
    """Write ``folder/target`` and ``folder/drafter``: configurations, and the drafter's tensors as zeros."""
    for part, config in (("target", target(**broken.target)), ("drafter", drafter(**broken.drafter))):
        write_model(folder / part, config)
    shapes = {**expected_shapes(DrafterConfig.from_dict(drafter())), **broken.tensors}
    write_tensors(folder / "drafter", {name: shape for name, shape in shapes.items() if shape is not None})
    index = {"metadata": {"total_size": 1_966_336}, "weight_map": {}}
    (folder / "target" / "model.safetensors.index.json").write_text(json.dumps(index))
    for file, text in broken.files.items():
        if text is None:
            (folder / file).unlink()
        else:
            (folder / file).write_text(text)


def write_tensors(folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Write a safetensors file of float32 zeros."""
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, folder / "model.safetensors")


def _key(key: str, value: Any, names: str) -> Broken:
    shown = "missing" if value is MISSING else json.dumps(value)
    return Broken(f"drafter {key} {shown}", names, drafter={key: value})


def _dflash2(name: str, names: str, flags: tuple[str, ...] = (), **changes: Any) -> Broken:
    nested = {**DFLASH2, "mask_token_id": 3, "target_layer_ids": [1, 4, 6], **changes}
    vocabulary = {"vocab_size": nested.pop("vocab_size", 1024)}
    drafter = {"architectures": ["DFlash2DraftModel"], "dflash_config": nested, **vocabulary}
    return Broken(name, names, drafter=drafter, target=vocabulary, flags=flags)


BLOCK, RANKS = "--speculative-num-draft-tokens", ("--tp-size", "2")
DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 4}
FULL = {"layer_types": ["full_attention"] * 2}
WINDOWED = {"layer_types": ["sliding_attention"] * 2}
YARN = {"rope_theta": 1e4, "rope_type": "yarn"}
_VOCABULARY = '{"model": {"vocab": {"%s": 0}}}'
OTHER_TOKENIZERS = {f"{owner}/tokenizer.json": _VOCABULARY % owner for owner in ("target", "drafter")}
_SELECTOR = ("hidden_projection.weight", "predecessor_codebook", "successor_codebook")
DFLASH2_TENSORS = ", ".join(f"candidate_selector.{part}" for part in _SELECTOR)

BROKEN: list[Broken] = [
    # the drafter's configuration
    _key("mask_token_id", "<|MASK|>", "mask_token_id is '<|MASK|>'"),
    _key("mask_token_id", -1, "mask_token_id is -1"),
    _key("mask_token_id", 1024, "mask_token_id 1024"),
    _key("target_layer_ids", MISSING, "target_layer_ids is missing"),
    _key("target_layer_ids", [1, "4"], "target_layer_ids is [1, '4']"),
    _key("target_layer_ids", [1, 4, 4], "target_layer_ids is [1, 4, 4]"),
    _key("target_layer_ids", [1, 4, -1], "target_layer_ids is [1, 4, -1]"),
    _key("target_layer_ids", [1, 4, 40], "40 is outside 0 to 6"),
    _key("target_layer_ids", [1, 4, 7], "7 is outside 0 to 6"),
    _key("target_layer_ids", [1, 4], "fc.weight"),
    _key("block_size", MISSING, "block_size is missing"),
    _key("block_size", "16", "block_size is '16'"),
    _key("num_target_layers", 12, "num_target_layers 12"),
    _key("num_hidden_layers", MISSING, "num_hidden_layers is missing"),
    _key("num_hidden_layers", 3, "layers.2."),
    _key("layer_types", ["full_attention"], "layer_types"),
    _key("layer_types", ["full_attention", "mamba"], "'mamba'"),
    _key("is_causal", "no", "is_causal is 'no'"),
    _key("use_sliding_window", True, "layer_types is missing"),
    Broken("sliding layers without a window", "sliding_window is missing", drafter=WINDOWED),
    Broken("a window for full-attention layers", "layer_types", drafter={**FULL, "use_swa": True}),
    _key("num_key_value_heads", 3, "num_attention_heads is 4"),
    _key("head_dim", 32, "self_attn"),
    _key("hidden_size", 128, "hidden_size 128"),
    _key("vocab_size", 1000, "vocab_size 1000"),
    _key("vocab_size", MISSING, "vocab_size is missing"),
    _key("rope_theta", MISSING, "rope_theta is missing"),
    _key("rope_parameters", YARN, "rope_parameters.factor is missing"),
    _key("rope_parameters", "default", "rope_parameters is 'default'"),
    _key("rope_parameters", {"rope_theta": 1e4, "rope_dim": 15}, "rope_dim"),
    _key("logit_scale", float("nan"), "logit_scale is nan"),
    # DFlash2: half a part, a part without its tensors, a name without its selector
    _key("architectures", ["DFlash2DraftModel"], "selector_rank is missing"),
    _key("selector_rank", 256, "selector_top_k is missing"),
    _key("conv_kernel_size", 2, "conv_group_size is missing"),
    _dflash2("a part of a convolution", "conv_kernel_size is 0", conv_kernel_size=0),
    _dflash2("groups of unequal sizes", "conv_group_size is 48", conv_group_size=48),
    _dflash2("more candidates than a kernel holds", "selector_top_k is 65", selector_top_k=65),
    _dflash2("a codebook wider than a kernel holds", "selector_rank is 2048", selector_rank=2048),
    _dflash2("a negative cap", "final_logit_softcapping is -1.0", final_logit_softcapping=-1.0),
    _dflash2("a selector of a reduced vocabulary", "draft_vocab_size is 512", draft_vocab_size=512),
    _dflash2("DFlash2's tensors missing", f"missing: {DFLASH2_TENSORS}, layers.0.attention_conv.base_kernel"),
    # drafters of other kinds, where SGLang has no worker of its own to leave them to
    _key("architectures", ["LiLiCorrDraftModel"], "LiLiCorr"),
    _key("architectures", [], "unknown"),
    _key("projector_type", "domino", "head domino"),
    _key("lilicorr_hidden_size", 64, "lilicorr_hidden_size"),
    _key("sample_from_anchor", False, "sample_from_anchor"),
    _key("hidden_act", "swigluoai", "swigluoai"),
    _key("kv_lora_rank", 512, "latent attention (MLA)"),
    # the target
    Broken("target of another width", "64 of the drafter, 96 of the target", target={"hidden_size": 96}),
    Broken("target of another vocabulary", "2048 of the target", target={"vocab_size": 2048}),
    Broken("target of another depth", "8 of the drafter, 6 of the target", target={"num_hidden_layers": 6}),
    Broken("target without a vocabulary", "None of the target", target={"vocab_size": MISSING}),
    Broken("no depth", "num_hidden_layers is None", {"num_target_layers": MISSING}, {"num_hidden_layers": MISSING}),
    # files
    Broken("another tokenizer", "tokenizer.json differs", files=OTHER_TOKENIZERS),
    Broken("no drafter configuration", "no config.json found", files={"drafter/config.json": None}),
    Broken("drafter not JSON", "not JSON", files={"drafter/config.json": "{"}),
    Broken("drafter a list", "holds a list", files={"drafter/config.json": "[]"}),
    Broken("a tensor missing", "norm.weight", tensors={"hidden_norm.weight": None}),
    Broken("a tensor too many", "markov_head", tensors={"markov_head.weight": (4,)}),
    Broken("fc of another width", "fc.weight", tensors={"fc.weight": (64, 128)}),
    # flags
    Broken("block wider than trained", "17 exceeds the drafter's block of 16", flags=(BLOCK, "17")),
    Broken("block of one", f"{BLOCK} 1", flags=(BLOCK, "1")),
    Broken("heads not divisible", "--tp-size 3", flags=("--tp-size", "3")),
    Broken("more ranks than heads", "4 heads", flags=("--tp-size", "8")),
    Broken("MLP not divisible", "intermediate_size 126", drafter={"intermediate_size": 126}, flags=("--tp-size", "4")),
    Broken("grammars without rollback", "--grammar-backend outlines", flags=("--grammar-backend", "outlines")),
]
