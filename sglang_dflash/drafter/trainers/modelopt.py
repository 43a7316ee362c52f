"""NVIDIA's Model Optimizer: plain but for a window, which it states apart from layers that it all calls full."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_dflash.drafter.keys import FULL, SLIDING, ConfigKeys


def plain(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The plain form, if ``config`` has a window in Model Optimizer's way: ``use_swa`` and ``swa_window_size``.

    The window is every layer's, and counts the current token as ours does. Causality stays as stated.
    """
    keys = ConfigKeys(config)
    window, types = keys.get("swa_window_size"), keys.get("layer_types")
    if not keys.get("use_swa") or window is None or not isinstance(types, list) or set(map(str, types)) != {FULL}:
        return config
    return {**config, "layer_types": [SLIDING] * len(types), "sliding_window": window}
