"""How SGLang reads the configuration of a drafter that our worker serves: hooks of ``ModelConfig``."""

from __future__ import annotations

from typing import Any

from sglang_dflash.drafter.formats import ARCHITECTURES
from sglang_dflash.launch.plan import decision_of
from sglang_dflash.upstream.names import get_server_args


def override_drafter(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Hook before ``ModelConfig.__init__``: a drafter has no overrides, where SGLang applies the target's."""
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
