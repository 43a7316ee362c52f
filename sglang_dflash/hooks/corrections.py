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

    SGLang refuses such a pair unless ``SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN`` is set, which lifts the target's
    limit as well. A DFlash drafter cannot read out of bounds: its K/V live in the target's slots, and its RoPE table
    grows to the target's context and the blocks beyond its end. Only the accept length may fall past the drafter's own
    context, which the launch warns of.

    Args:
        context_length: the target's, tokens.
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

    It calls the language model's method of the same name, which Qwen3.5 has and Qwen3-VL lacks. EAGLE-3's method
    captures the same layers without it.
    """
    if hasattr(model.model, "set_dflash_layers_to_capture"):
        original(model, layer_ids)
    else:
        model.set_eagle3_layers_to_capture(layer_ids)


EVERYONE, TARGET = "all", "target"


def update_target_only(result: list[tuple[str, Any]], _: Any, selector: str = EVERYONE) -> list[tuple[str, Any]]:
    """Hook after ``SchedulerWeightUpdaterManager._select_runners``: whoever asks for all models means the target.

    SGLang would load the same tensors into both. A drafter as wide as its target has tensors of the same names and
    shapes, and would draft with the target's; any other name ends the server. ``"draft"`` still means the drafter.

    Args:
        result: role and runner of each selected model.
    """
    if selector != EVERYONE or serving.plan is None:
        return result
    return [(role, runner) for role, runner in result if role == TARGET]
