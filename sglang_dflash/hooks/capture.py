"""The hidden states of a Qwen3-VL target, which SGLang 0.5.23 does not hand to DFLASH."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def capture_layers(original: Callable[..., None], model: Any, layer_ids: list[int]) -> None:
    """Around ``Qwen3VLForConditionalGeneration.set_dflash_layers_to_capture``.

    It calls the language model's method of that name, which Qwen3.5's has and Qwen3-VL's lacks. The one of EAGLE-3 asks
    for the same layers, and does not need it.
    """
    if hasattr(model.model, "set_dflash_layers_to_capture"):
        original(model, layer_ids)
    else:
        model.set_eagle3_layers_to_capture(layer_ids)
