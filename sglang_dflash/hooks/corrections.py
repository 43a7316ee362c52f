"""Corrections of SGLang: the drafter's context, the captured layers, weight updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dflash.drafter.formats import ARCHITECTURES
from sglang_dflash.plan import serving
from sglang_dflash.plan.serving import ServingPlan
from sglang_dflash.upstream import get_server_args, read_record


def extend_drafter_context(model_config: Any, context_length: int | None) -> None:
    """Hook before ``ModelConfig._derive_context_length``: serve the target's whole context with a shorter drafter.

    SGLang refuses such a pair unless ``SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN`` is set, which also lifts the
    target's limit. A DFlash drafter cannot read out of bounds: its K/V are in the target's slots, and its RoPE table
    covers the target's context plus the blocks beyond its end. Past the drafter's context only the accept length may
    fall, and the launch warns about it.

    Args:
        context_length: context of the target, tokens.
    """
    architectures = model_config.hf_config.architectures or []
    ours = model_config.is_draft_model and set(architectures) & set(ARCHITECTURES)
    if not ours or context_length is None:
        return
    if isinstance(read_record(get_server_args()), ServingPlan):
        text = model_config.hf_text_config
        text.max_position_embeddings = max(text.max_position_embeddings, context_length)


def capture_layers(original: Callable[..., None], model: Any, layer_ids: list[int]) -> None:
    """Hook around ``Qwen3VLForConditionalGeneration.set_dflash_layers_to_capture``, which fails in SGLang 0.5.23.

    It calls a method of the language model that Qwen3.5 has and Qwen3-VL lacks. EAGLE-3's method captures the same
    layers without it.
    """
    if hasattr(model.model, "set_dflash_layers_to_capture"):
        original(model, layer_ids)
    else:
        model.set_eagle3_layers_to_capture(layer_ids)


ALL, TARGET = "all", "target"


def update_target_only(result: list[tuple[str, Any]], _: Any, selector: str = ALL) -> list[tuple[str, Any]]:
    """Hook after ``SchedulerWeightUpdaterManager._select_runners``: treat ``"all"`` as the target.

    SGLang would load the same tensors into both models. A drafter as wide as its target has tensors of the same names
    and shapes and would draft with the target's; other names stop the server. ``"draft"`` still selects the drafter.

    Args:
        result: role and runner of each selected model.
    """
    if selector != ALL or serving.plan is None:
        return result
    return [(role, runner) for role, runner in result if role == TARGET]
