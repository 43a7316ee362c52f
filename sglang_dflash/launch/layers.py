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
    """Layers of a target by what they store per request: K/V of all tokens or of a window, or a recurrent state."""

    full: int
    sliding: int = 0
    delta: int = 0  # gated delta net


def layers_of(text: Mapping[str, Any]) -> Layers:
    """Count the layers of a target."""
    names = text.get("layer_types")
    kinds = Counter(map(str, names if isinstance(names, list) else ()))
    if not kinds:
        layers = count(text, "num_hidden_layers")
        full = layers // count(text, "full_attention_interval", 1)
        return Layers(full, delta=layers - full)
    sliding, delta = kinds[SLIDING], kinds["linear_attention"]
    return Layers(kinds.total() - sliding - delta, sliding, delta)
