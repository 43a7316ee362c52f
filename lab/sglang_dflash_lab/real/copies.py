"""Flags of a server that drafts by copies alone."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from sglang_dflash_lab.train.drafter import FULL, Drafter, DrafterConfig

BLOCK = 16


def copies_alone(target: Path) -> tuple[str, ...]:
    """Return the server's flags. A drafter of zeros has equal logits, so every copy stands."""
    drafter = target.with_name("drafter-of-zeros")
    if not drafter.exists():
        write_drafter(target, drafter, zeros=True)
    return draft_flags(drafter) + ("--speculative-adaptive",)


def draft_flags(drafter: Path) -> tuple[str, ...]:
    block = ("--speculative-num-draft-tokens", str(BLOCK))
    return ("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(drafter), *block)


def write_drafter(target: Path, folder: Path, *, zeros: bool) -> None:
    """Write an untrained drafter of one layer for a Llama target: random weights, or zeros."""
    keys = json.loads((target / "config.json").read_text())
    keys |= {"rope_theta": keys["rope_parameters"]["rope_theta"], "num_target_layers": keys["num_hidden_layers"]}
    keys |= {"layer_types": (FULL,), "sliding_window": None, "block_size": BLOCK, "mask_token_id": 0}
    keys |= {"target_layer_ids": (keys["num_hidden_layers"] // 2,)}
    torch.manual_seed(0)
    drafter = Drafter(DrafterConfig(**{name: keys[name] for name in DrafterConfig.__annotations__ if name in keys}))
    for weight in drafter.parameters() if zeros else ():
        weight.detach().zero_()
    drafter.save(folder)
