"""Which drafters SGLang serves under the name DFLASH and this package does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_dflash.drafter.keys import ConfigKeys

ARCHITECTURES = ("DFlashDraftModel",)

_BY_ARCHITECTURE = {
    "DFlash2DraftModel": "DFlash2 (candidate selector)",
    "DFlash2BeamDraftModel": "DFlash2 (candidate selector)",
    "MiniMaxDFlash2DraftModel": "DFlash2 (candidate selector)",
    "LiLiCorrDraftModel": "LiLiCorr (transition reranker)",
    "DFlashLagunaForCausalLM": "Laguna (gated attention)",
    "MuseGlimmerAssistantModel": "Muse-Glimmer (scaled target embedding)",
    "Qwen3DSparkModel": "DSpark (Markov head)",
}
_BY_KEY = {
    "selector_rank": "DFlash2 (candidate selector)",
    "conv_kernel_size": "DFlash2 (grouped convolution)",
    "lilicorr_hidden_size": "LiLiCorr (transition reranker)",
    "has_embed_tokens": "Nemotron (its own embedding)",
    "use_gemma_norm": "DFlash with Gemma's norm",
    "attention_sink_bias": "MiMo (attention sinks)",
    "attention_value_scale": "MiMo (attention value scale)",
}


def kind_left_to_builtin(config: Mapping[str, Any]) -> str | None:
    """Name of the drafter's family, None for plain DFlash.

    Only what ``config.json`` declares is read; undeclared extra tensors are found by the loader.
    """
    architectures = config.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    if kind := _BY_ARCHITECTURE.get(str(architecture)):
        return kind
    keys = ConfigKeys(config)
    if kind := next((kind for key, kind in _BY_KEY.items() if keys.get(key)), None):
        return kind
    if keys.get("projector_type") == "domino":
        return "Domino (GRU correction)"
    if keys.get("sample_from_anchor") is False:
        return "Nemotron (block without its anchor)"
    activation = keys.get("hidden_act")
    if activation not in (None, "silu"):
        return f"DFlash with the activation {activation}"
    return None if architecture in ARCHITECTURES else f"unknown (architecture {architecture})"
