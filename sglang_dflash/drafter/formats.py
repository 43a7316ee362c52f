"""Drafter configurations: the keys of ``config.json``, other trainers' forms, and other types of drafters."""

from collections.abc import Mapping
from typing import Any

from sglang_dflash.errors import DFlashError

FULL, SLIDING = "full_attention", "sliding_attention"
PLAIN = "DFlashDraftModel"
ARCHITECTURES = (PLAIN, "DFlash2DraftModel", "DFlash2BeamDraftModel", "MiniMaxDFlash2DraftModel")
INPUT_SCALE, OUTPUT_SCALES = "input_embedding_scale", ("output_multiplier", "logit_scale")
SOFTCAP = "final_logit_softcapping"

# keys of drafters with additional layers or inputs
_OTHER_KEYS = (
    "lilicorr_hidden_size",
    "has_embed_tokens",
    "use_gemma_norm",
    "attention_sink_bias",
    "attention_value_scale",
)
# architecture or key -> type that SGLang does not serve as DFLASH
_UNSERVED = {
    "thresh_head_direct_len": "AdaFlash (head for the length of a block), which SGLang does not serve",
    "Qwen3XPressModel": "XPress (refinement head), which SGLang does not serve",
    "DSparkDraftModel": "DSpark (Markov head), as SpecForge writes it",
}
_OTHERS = (
    "use the target's DFlash or DFlash2 drafter, or serve this one with its authors' engine (DSpark: convert it with "
    "SpecForge's scripts/gates/normalize_dflash_export.py and serve it with --speculative-algorithm DSPARK)"
)
DRAFTERS = ("dflash_config", "target_layer_ids", "mask_token_id", "block_size")  # any of them marks a DFLASH drafter
_SPECULATORS = "speculators_model_type"
_AUTOMODEL_CLASSES = {"Qwen3DFlashDraftModel": PLAIN, "Qwen3DFlash2DraftModel": "DFlash2DraftModel"}
_CLASSES = {**_AUTOMODEL_CLASSES, "DominoDraftModel": PLAIN}  # the last is SpecForge's
_DFLASH2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k", SOFTCAP)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's part: ``text_config`` of a multimodal model, otherwise ``config``."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return all non-null keys on one level: ``dflash_config`` precedes the transformer's, then the others."""
    nested = config.get("dflash_config")
    places = (config, text_config(config), nested if isinstance(nested, Mapping) else {})
    return {key: value for place in places for key, value in place.items() if value is not None}


def kind_left_to_builtin(config: Mapping[str, Any]) -> str | None:
    """Return the type of a drafter that SGLang serves as DFLASH and this package does not, or None.

    Raises:
        DFlashError: SGLang does not serve it either.
    """
    name, keys = architecture(config), flat(config)
    if "DFlash" not in str(name) and keys.keys().isdisjoint(DRAFTERS):
        algorithm = "EAGLE3" if "Eagle3" in str(name) else "EAGLE" if "Eagle" in str(name) else "STANDALONE"
        raise DFlashError(
            f"{name} is no DFLASH drafter: its config.json states none of {', '.join(DRAFTERS)}",
            remedy=f"use the target's DFLASH drafter, serve this model with --speculative-algorithm {algorithm}, or "
            "leave --speculative-draft-model-path out to copy repeated text without a drafter",
        )
    if keys.get("kv_lora_rank"):
        raise DFlashError("the drafter has latent attention (MLA), which SGLang's DFlash model lacks", remedy=_OTHERS)
    if name not in ARCHITECTURES:
        return name or "unknown"
    for key in _OTHER_KEYS:
        if keys.get(key):
            return f"DFlash with {key}"
    head, activation = keys.get("projector_type"), keys.get("hidden_act")
    if head not in (None, "dflash"):
        return f"DFlash with the head {head}"
    if keys.get("sample_from_anchor") is False:
        return "DFlash with sample_from_anchor false"
    return None if activation in (None, "silu") else f"DFlash with the activation {activation}"


def plain_form(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration in z-lab's form; DFlashError if it cannot be served."""
    if _SPECULATORS in config:
        return _from_speculators(config)
    keys, name, dflash = flat(config), architecture(config), config.get("dflash_config")
    for mark, kind in _UNSERVED.items():
        if mark == name or keys.get(mark):
            raise DFlashError(f"unsupported drafter type: {kind}", remedy=_OTHERS)
    changes: dict[str, Any] = {"architectures": [_CLASSES[name]]} if name in _CLASSES else {}
    if name in _AUTOMODEL_CLASSES and isinstance(dflash, Mapping) and dflash.get("causal") is True:
        # AutoModel's JetSpec recipe extends its DFlash recipe and leaves this key
        changes["is_causal"] = True
    window, types = keys.get("swa_window_size"), keys.get("layer_types")
    if keys.get("use_swa") and window is not None and isinstance(types, list) and set(map(str, types)) == {FULL}:
        # Model Optimizer's window counts the current token, as ours does, and applies to every layer
        changes |= {"layer_types": [SLIDING] * len(types), "sliding_window": window}
    return {**config, **changes}


def _from_speculators(config: Mapping[str, Any]) -> dict[str, Any]:
    algorithm, ffn = config[_SPECULATORS], config.get("draft_ffn_type")
    if algorithm not in ("dflash", "dflash2"):
        raise _unserved_by_speculators(f"{_SPECULATORS} is {algorithm!r}, not dflash or dflash2")
    if ffn == "moe":
        raise _unserved_by_speculators(f"draft_ffn_type is {ffn!r}, not an MLP")
    layers: Any = config.get("transformer_layer_config")
    require(isinstance(layers, Mapping), "transformer_layer_config", layers, "an object: the drafter's transformer")
    if config.get("sample_from_anchor"):
        raise _unserved_by_speculators("sample_from_anchor is true")
    keys = flat({**layers, **config})
    target_size, size = keys.get("target_hidden_size"), keys.get("hidden_size")
    if target_size not in (None, size):
        raise _unserved_by_speculators(f"target_hidden_size {target_size!r} differs from hidden_size {size!r}")
    kept = ("block_size", "mask_token_id", "draft_vocab_size", INPUT_SCALE, *OUTPUT_SCALES, *_DFLASH2)
    dflash = {
        **{key: config[key] for key in kept if key in config},
        "target_layer_ids": _layers_before(config.get("aux_hidden_state_layer_ids")),
        "copies_vocabulary": True,
    }
    second = algorithm == "dflash2"
    if config.get("sliding_window_non_causal", second):  # the default of each type
        dflash["causal"] = False
    quantization = config.get("quantization_config")
    return {
        **layers,
        "architectures": ["DFlash2DraftModel" if second else PLAIN],
        "model_type": "qwen3",  # the drafter's layers are Qwen3's for every target
        "dtype": config.get("dtype") or config.get("torch_dtype"),
        **_rope_of_speculators(layers),
        **({"quantization_config": quantization} if quantization else {}),
        "dflash_config": dflash,
    }


def _layers_before(ids: Any) -> list[int]:
    key = "aux_hidden_state_layer_ids"  # hidden state 2 is the output of layer 1
    require(
        isinstance(ids, list) and all(isinstance(i, int) for i in ids), key, ids, "a list of hidden states' numbers"
    )
    expected = "numbers from 1 on: 0 is the embedding's output, which SGLang does not capture"
    require(min(ids, default=1) > 0, key, ids, expected)
    return [i - 1 for i in ids]


def _rope_of_speculators(layers: Mapping[str, Any]) -> dict[str, Any]:
    # one RoPE over the whole head; other keys may be copies of a multimodal target's
    parameters = layers.get("rope_parameters")
    if not isinstance(parameters, Mapping):
        return {}
    nested = parameters.get(SLIDING)
    used = nested if isinstance(nested, Mapping) else parameters
    foreign = ("mrope_section", "mrope_interleaved", "partial_rotary_factor")
    return {"rope_parameters": {key: value for key, value in used.items() if key not in foreign}}


def _unserved_by_speculators(found: str) -> DFlashError:
    return DFlashError(
        f"in the drafter's config.json, which speculators wrote, {found}",
        remedy="serve it with vLLM, or train a DFlash drafter without this",
    )


def require(condition: bool, key: str, value: object, expected: str) -> None:
    """Raise the error for a missing (``value`` None) or unusable key, which should be ``expected``."""
    if condition:
        return
    found = "is missing" if value is None else f"is {value!r}"
    raise DFlashError(
        f"{key} {found} in the drafter's config.json and should be {expected}",
        remedy=f"use a drafter whose config.json states {key}, or add the value it was trained with",
    )


def architecture(config: Mapping[str, Any]) -> str | None:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else None
