"""Sizes and layers of a target, from its ``config.json``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_dflash.drafter.formats import SLIDING
from sglang_dflash.errors import DFlashError

_MAX_SIZE = 1 << 31


def count(text: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return a size, or ``default`` if it is absent or 0; else raise DFlashError."""
    value = text.get(key)
    if default is not None and (value is None or value == 0):
        return default
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _MAX_SIZE:
        return value
    raise DFlashError(
        f"{key} is {value!r} in the target's config.json, not an integer from 1 to {_MAX_SIZE}",
        remedy="check the target's config.json",
    )


@dataclass(frozen=True)
class Layers:
    """Layers of a target by what they keep of a request: K/V of all tokens or of a window, or a recurrent state."""

    full: int
    sliding: int = 0
    delta: int = 0  # gated delta net
    mamba: int = 0  # Mamba2


def layers_of(text: Mapping[str, Any]) -> Layers:
    """Count the layers of a target. Nemotron-H's MLPs and experts are layers that keep nothing."""
    kinds = _kinds(text)
    if not kinds:
        layers = count(text, "num_hidden_layers")
        full = layers // count(text, "full_attention_interval", 1)
        return Layers(full, delta=layers - full)
    sliding, delta, mamba = kinds[SLIDING], kinds["linear_attention"], kinds["M"] + kinds["mamba"]
    others = sum(kinds[kind] for kind in ("-", "E", "mlp", "moe"))
    return Layers(kinds.total() - sliding - delta - mamba - others, sliding, delta, mamba)


def has_mamba(text: Mapping[str, Any]) -> bool:
    kinds = _kinds(text)
    return kinds["M"] + kinds["mamba"] > 0


def _kinds(text: Mapping[str, Any]) -> Counter[str]:
    # by name, or Nemotron-H's pattern of letters
    names = text.get("layers_block_type") or text.get("hybrid_override_pattern") or text.get("layer_types")
    return Counter(map(str, names)) if isinstance(names, str | list) else Counter()
