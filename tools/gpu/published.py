"""The five published pairs as configurations alone: their cards' dimensions, for servers with random weights."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

CARDS = Path(__file__).parents[2] / "tests/fixtures/cards"
PAIRS = ("Qwen3.5-4B", "Qwen3.5-27B", "Qwen3.6-27B", "Qwen3.6-35B-A3B", "Qwen3-Coder-Next")
DUMMY = ("--load-format", "dummy", "--skip-tokenizer-init", "--dtype", "bfloat16")


def write(pair: str, folder: Path, layers: int = 0) -> None:
    """Write ``folder/target`` and ``folder/drafter`` with a ``config.json`` each.

    Args:
        layers: the target's depth if it is to be cut, a multiple of the pattern's length; 0 for the published one. The
            drafter then reads layers at the same parts of the depth.
    """
    target, drafter = (
        json.loads((CARDS / pair / model / "config.json").read_text()) for model in ("target", "drafter")
    )
    if layers:
        target, drafter = cut(target, drafter, layers)
    for model, config in (("target", target), ("drafter", drafter)):
        (folder / model).mkdir(parents=True, exist_ok=True)
        (folder / model / "config.json").write_text(json.dumps(config))


def cut(target: dict[str, Any], drafter: dict[str, Any], layers: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both configurations for a target of the first ``layers`` layers."""
    target, drafter = copy.deepcopy(target), copy.deepcopy(drafter)
    text = target.get("text_config", target)
    published = text["num_hidden_layers"]
    text["num_hidden_layers"] = layers
    if "layer_types" in text:
        text["layer_types"] = text["layer_types"][:layers]
    ids = drafter["dflash_config"]["target_layer_ids"]
    drafter["dflash_config"]["target_layer_ids"] = _spread([layer * (layers - 1) // (published - 1) for layer in ids])
    if "num_target_layers" in drafter:
        drafter["num_target_layers"] = layers
    return target, drafter


def _spread(ids: list[int]) -> list[int]:
    """Ascending without repeats: layers that fell together move up."""
    spread: list[int] = []
    for layer in ids:
        spread.append(max(layer, spread[-1] + 1) if spread else layer)
    return spread


def flags(folder: Path, block: int | None) -> tuple[str, ...]:
    """The server's models; without a drafter if ``block`` is None."""
    target = ("--model-path", str(folder / "target"), *DUMMY)
    if block is None:
        return target
    return (
        *target,
        *("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(folder / "drafter")),
        *("--speculative-num-draft-tokens", str(block), "--speculative-draft-load-format", "dummy"),
    )
