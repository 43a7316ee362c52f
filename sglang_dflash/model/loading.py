"""Hooks of model loading: a drafter's configuration, and the target's layers that SGLang captures."""

from collections.abc import Callable
from typing import Any

from sglang_dflash.drafter.formats import ARCHITECTURES
from sglang_dflash.launch.plan import decision_of
from sglang_dflash.upstream.names import get_server_args


def _as_for_eagle3(model: Any, layer_ids: list[int]) -> None:
    model.set_eagle3_layers_to_capture(list(layer_ids))


def _by_its_list(model: Any, layer_ids: list[int]) -> None:
    model.capture_aux_hidden_states = True
    model.model.layers_to_capture = [layer + 1 for layer in layer_ids]  # a layer's output is the next one's input


# By class, where SGLang 0.5.23 has no working method for DFLASH. A test compares the captured layers of each with
# transformers' hidden states: Gemma 3's method for EAGLE-3 captures without the residual. Qwen3-VL's own method calls
# one that its language model lacks.
CAPTURES: dict[str, Callable[[Any, list[int]], None]] = {
    "Glm4ForCausalLM": _by_its_list,
    "Glm4MoeForCausalLM": _as_for_eagle3,
    "MiniMaxM2ForCausalLM": _as_for_eagle3,
    "Qwen2ForCausalLM": _as_for_eagle3,
    "Qwen3VLForConditionalGeneration": _as_for_eagle3,
}


def capture_layers(original: Callable[..., None], **arguments: Any) -> None:
    """Hook around ``configure_aux_hidden_state_capture``, which raises for a class without a method."""
    model = arguments["model"]
    capture = CAPTURES.get(type(model).__name__)
    if capture is not None and arguments["dflash_use_aux_hidden_state"] and not arguments["is_dspark"]:
        capture(model, arguments["dflash_target_layer_ids"])
    else:
        original(**arguments)


def capture_without_drafter(original: Callable[..., None], **kwargs: Any) -> None:
    """Hook around ``_resolve_dflash_aux_hidden_state``: without a drafter, capture no hidden states."""
    plan = decision_of(get_server_args()).plan
    if plan is None or plan.has_drafter:
        original(**kwargs)


def override_drafter(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Hook before ``ModelConfig.__init__``: drop the target's overrides, which SGLang applies to the drafter too."""
    if kwargs.get("is_draft_model") and decision_of(get_server_args()).plan:
        kwargs["model_override_args"] = "{}"
    return args, kwargs


def lift_context(model_config: Any, context_length: int | None) -> None:
    """Hook before ``ModelConfig._derive_context_length``: lift a shorter drafter's limit.

    A DFlash drafter cannot read out of bounds: its K/V use the target's slots, and its RoPE table covers the target's
    context plus the blocks beyond.
    """
    ours = set(model_config.hf_config.architectures or []) & set(ARCHITECTURES)
    if model_config.is_draft_model and ours and decision_of(get_server_args()).plan and context_length is not None:
        text = model_config.hf_text_config
        text.max_position_embeddings = max(text.max_position_embeddings, context_length)
