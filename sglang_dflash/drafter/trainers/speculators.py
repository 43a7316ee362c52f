"""vLLM's speculators: the transformer in ``transformer_layer_config``, everything else beside it.

``aux_hidden_state_layer_ids`` count the hidden states from the embedding's output, so that id i is the output of layer
i - 1. Embedding and LM head are frozen copies of the target's; a reduced vocabulary comes with its two maps, ``t2d``
and ``d2t``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_dflash.drafter.keys import ConfigKeys, unusable
from sglang_dflash.errors import DFlashError

_MARK = "speculators_model_type"


def wrote(config: Mapping[str, Any]) -> bool:
    """Whether speculators wrote this ``config.json``."""
    return _MARK in config


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """The plain form of a speculators configuration.

    Raises:
        DFlashError: another algorithm, or a DFlash drafter that our worker would not draft with as it was trained.
    """
    if config[_MARK] != "dflash":
        raise _unserved(f"{_MARK} {config[_MARK]!r}", "dflash")
    layers = config.get("transformer_layer_config")
    if not isinstance(layers, Mapping):
        raise unusable("transformer_layer_config", layers, "an object: the drafter's transformer")
    if config.get("sample_from_anchor"):
        raise _unserved("sample_from_anchor true: its anchor drafts a token too", "false: only mask tokens draft")
    keys = ConfigKeys({**layers, **config})
    if keys.get("target_hidden_size") not in (None, keys.get("hidden_size")):
        found = f"target_hidden_size {keys.get('target_hidden_size')!r}, hidden_size {keys.get('hidden_size')!r}"
        raise _unserved(found, "the same for both")
    dflash = {
        "block_size": config.get("block_size"),
        "mask_token_id": config.get("mask_token_id"),
        "target_layer_ids": _layers_before(config.get("aux_hidden_state_layer_ids")),
        "draft_vocab_size": config.get("draft_vocab_size"),
        "copies_vocabulary": True,
    }
    if config.get("sliding_window_non_causal"):
        dflash["causal"] = False
    quantization = config.get("quantization_config")
    return {
        **layers,
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",  # whatever the target is: the drafter's layers are Qwen3's
        "dtype": config.get("dtype") or config.get("torch_dtype"),
        **_rope(layers),
        **({"quantization_config": quantization} if quantization else {}),
        "dflash_config": dflash,
    }


def _layers_before(ids: Any) -> list[int]:
    """Layers whose output the hidden states are: 2 is the output of layer 1."""
    key = "aux_hidden_state_layer_ids"
    if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise unusable(key, ids, "a list of hidden states' numbers")
    if any(i < 1 for i in ids):
        raise unusable(key, ids, "numbers from 1 on: 0 is the embedding's output, which SGLang does not capture")
    return [i - 1 for i in ids]


def _rope(layers: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE as its trainer runs it: one for all layers, of the whole head, with positions in one dimension.

    The configuration may still hold what it copied from a multimodal target.
    """
    parameters = layers.get("rope_parameters")
    if not isinstance(parameters, Mapping):
        return {}
    nested = parameters.get("sliding_attention")
    chosen = nested if isinstance(nested, Mapping) else parameters
    foreign = ("mrope_section", "mrope_interleaved", "partial_rotary_factor")
    return {"rope_parameters": {key: value for key, value in chosen.items() if key not in foreign}}


def _unserved(found: str, expected: str) -> DFlashError:
    return DFlashError(
        f"{found} in the drafter's config.json, which speculators wrote",
        expected=expected,
        remedy="serve it with vLLM, or train a DFlash drafter without this",
    )
