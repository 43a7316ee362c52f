"""Counts and sizes in a target's ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_dflash.drafter.config import text_config
from sglang_dflash.errors import DFlashError

DTYPE_BYTES = {
    "float32": 4, "bfloat16": 2, "float16": 2, "half": 2, "bf16": 2,
    "fp8_e4m3": 1, "fp8_e5m2": 1,
}  # fmt: skip
_LARGEST = 1 << 31


def count(text: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return a size from the target's configuration, or ``default`` if it is absent or 0; else raise DFlashError."""
    value = text.get(key)
    if default is not None and (value is None or value == 0):
        return default
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _LARGEST:
        return value
    raise DFlashError(
        f"{key} is {value!r} in the target's config.json",
        expected=f"an integer from 1 to {_LARGEST}",
        remedy="check the target's config.json",
    )


def full_layers(text: Mapping[str, Any]) -> int:
    """Return the number of the target's layers with K/V."""
    types = text.get("layer_types")
    if isinstance(types, list):
        return sum(kind != "linear_attention" for kind in types)
    return count(text, "num_hidden_layers") // count(text, "full_attention_interval", 1)


def is_hybrid(config: Mapping[str, Any]) -> bool:
    """Return whether a target has recurrent layers."""
    text = text_config(config)
    layers = text.get("num_hidden_layers")
    return isinstance(layers, int) and full_layers(text) < layers


def matrix_numbers(text: Mapping[str, Any], tp_size: int) -> int:
    """Return the numbers in a request's recurrent matrices (gated delta rule) on one rank, over all layers.

    0 for a dense target, and for one that does not state its heads.
    """
    layers = count(text, "num_hidden_layers") - full_layers(text)
    heads, value_dim, key_dim = (
        count(text, f"linear_{key}", 0) for key in ("num_value_heads", "value_head_dim", "key_head_dim")
    )
    return max(0, layers) * (heads // tp_size) * value_dim * key_dim
