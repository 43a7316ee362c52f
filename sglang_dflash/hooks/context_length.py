"""A drafter that was configured for a shorter context than its target still serves the target's whole context.

SGLang refuses the pair unless ``SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN`` is set, a switch that lifts the
target's limit as well. For a DFlash drafter nothing can be read out of bounds: its K/V live in the target's slots,
and the drafter grows its RoPE table to the target's context and the blocks that reach past its end. Only accept length
may fall beyond its own context, which the preflight warns of.
"""

from __future__ import annotations

from typing import Any

from sglang_dflash.drafter.kinds import ARCHITECTURES
from sglang_dflash.hooks.takeover import reason_for_builtin
from sglang_dflash.upstream import get_server_args


def extend_drafter_context(model_config: Any, context_length: int | None) -> None:
    """Hook before ``ModelConfig._derive_context_length``; ``context_length`` is the target's, in tokens."""
    architectures = model_config.hf_config.architectures or []
    ours = model_config.is_draft_model and set(architectures) & set(ARCHITECTURES)
    if not ours or context_length is None or reason_for_builtin(get_server_args()):
        return
    text = model_config.hf_text_config
    text.max_position_embeddings = max(text.max_position_embeddings, context_length)
