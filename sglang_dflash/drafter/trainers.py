"""Drafters of other trainers, brought to the plain form: SpecForge, speculators, AutoModel, Model Optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_dflash.drafter.keys import (
    FULL,
    INPUT_SCALE,
    OUTPUT_SCALES,
    SLIDING,
    ConfigKeys,
    architecture,
    unusable,
)
from sglang_dflash.errors import DFlashError

_MARK = "speculators_model_type"
_XPRESS = "XPress (refinement head)"
_OF_SPECULATORS = {"dflash2": "DFlash2 (candidate selector)", "xpress": _XPRESS}
_CLASSES = {"Qwen3DFlashDraftModel": "DFlashDraftModel", "Qwen3DFlash2DraftModel": "DFlash2DraftModel"}


def plain_form(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same drafter as z-lab would have written it; ``config`` itself if it is plain, or no drafter at all.

    Raises:
        DFlashError: a trainer's form that cannot be served.
    """
    if _MARK in config:
        return _from_speculators(config)
    _refuse_unserved(config)
    return _from_modelopt(_from_specforge(_from_automodel(config)))


def _refuse_unserved(config: Mapping[str, Any]) -> None:
    """Refuse, by name, drafters that neither our worker nor SGLang's serves."""
    is_adaflash = ConfigKeys(config).get("thresh_head_direct_len")
    kind = "AdaFlash (head for the length of a block)" if is_adaflash else _XPRESS
    if is_adaflash or architecture(config) == "Qwen3XPressModel":
        raise DFlashError(
            f"the drafter is of the kind {kind}, which SGLang does not serve",
            expected="a plain DFlash drafter",
            remedy="use the target's plain DFlash drafter, or serve this one with its authors' engine",
        )


def _from_automodel(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The plain form, if AutoModel wrote ``config``.

    Its JetSpec recipe trains with a causal block and says so in ``dflash_config.causal``; the ``is_causal`` false
    beside it is a leftover of the DFlash recipe that it extends.
    """
    name = _CLASSES.get(str(architecture(config)))
    if name is None:
        return config
    dflash = config.get("dflash_config")
    jetspec = isinstance(dflash, Mapping) and dflash.get("causal") is True
    return {**config, "architectures": [name], **({"is_causal": True} if jetspec else {})}


def _from_modelopt(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The plain form, if ``config`` has a window in Model Optimizer's way: ``use_swa`` and ``swa_window_size``.

    The window is every layer's, and counts the current token as ours does. Causality stays as stated.
    """
    keys = ConfigKeys(config)
    window, types = keys.get("swa_window_size"), keys.get("layer_types")
    if not keys.get("use_swa") or window is None or not isinstance(types, list) or set(map(str, types)) != {FULL}:
        return config
    return {**config, "layer_types": [SLIDING] * len(types), "sliding_window": window}


def _from_specforge(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The plain form, if SpecForge wrote ``config``.

    Raises:
        DFlashError: a DSpark drafter, which SGLang serves by another algorithm and from other keys.
    """
    name = architecture(config)
    if name == "DSparkDraftModel":
        raise DFlashError(
            "the drafter is of the kind DSpark (Markov head), as SpecForge writes it",
            expected="a plain DFlash drafter",
            remedy="convert it with SpecForge's scripts/gates/normalize_dflash_export.py and serve it with "
            "--speculative-algorithm DSPARK",
        )
    return {**config, "architectures": ["DFlashDraftModel"]} if name == "DominoDraftModel" else config


def _from_speculators(config: Mapping[str, Any]) -> dict[str, Any]:
    """The plain form of a speculators configuration.

    Raises:
        DFlashError: another algorithm, or a DFlash drafter that our worker would not draft with as it was trained.
    """
    if (kind := config[_MARK]) != "dflash":
        name = _OF_SPECULATORS.get(str(kind))
        raise _unserved(f"{_MARK} {kind!r}{f', of the kind {name},' if name else ''}", "dflash")
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
        **{key: config[key] for key in (INPUT_SCALE, *OUTPUT_SCALES) if key in config},
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
