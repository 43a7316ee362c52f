"""Drafters that SGLang serves under the name DFLASH and this package does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_dflash.drafter.keys import ConfigKeys, architecture

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
    "final_logit_softcapping": "DFlash with softcapped logits",
}
_BY_HEAD = {"domino": "Domino (GRU correction)", "dspark": "DSpark (Markov head)"}


def kind_left_to_builtin(config: Mapping[str, Any]) -> str | None:
    """Name of the drafter's family, None for plain DFlash.

    Only what ``config.json`` declares is read; undeclared extra tensors are found by the loader.
    """
    name = architecture(config)
    if kind := _BY_ARCHITECTURE.get(str(name)):
        return kind
    keys = ConfigKeys(config)
    if kind := next((kind for key, kind in _BY_KEY.items() if keys.get(key)), None):
        return kind
    head = keys.get("projector_type")
    if head not in (None, "dflash"):
        return _BY_HEAD.get(str(head), f"DFlash with the head {head}")
    if keys.get("sample_from_anchor") is False:
        return "Nemotron (block without its anchor)"
    activation = keys.get("hidden_act")
    if activation not in (None, "silu"):
        return f"DFlash with the activation {activation}"
    return None if name in ARCHITECTURES else f"unknown (architecture {name})"
