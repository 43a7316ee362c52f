"""The keys of a drafter's ``config.json``, and the forms in which other trainers write it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_dflash.errors import DFlashError

FULL, SLIDING = "full_attention", "sliding_attention"
LARGEST = 1 << 31  # of a count; what a file claims is multiplied and allocated
MOST_LAYERS = 1024
MOST_POSITIONS = 1 << 24  # of a RoPE table, which has a row for each
INPUT_SCALE, OUTPUT_SCALES = "input_embedding_scale", ("output_multiplier", "logit_scale")
_LARGEST_FLOAT = 3e38  # float32's


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a configuration: ``text_config`` of a multimodal model, else the whole."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def architecture(config: Mapping[str, Any]) -> str | None:
    """The first of ``architectures``; None if there is none."""
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else None


def unusable(key: str, value: object, expected: str) -> DFlashError:
    """The error for a key that is missing (``value`` None) or holds something else than ``expected``."""
    found = "is missing" if value is None else f"is {value!r}"
    return DFlashError(
        f"{key} {found} in the drafter's config.json",
        expected=expected,
        remedy=f"use a drafter whose config.json states {key}, or add the value it was trained with",
    )


class ConfigKeys:
    """Typed look-ups in one drafter configuration; every method raises :func:`unusable`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        nested = config.get("dflash_config")
        self._places = (nested if isinstance(nested, Mapping) else {}, text_config(config), config)

    def get(self, key: str) -> Any:
        return next((place[key] for place in self._places if place.get(key) is not None), None)

    def optional(self, key: str, kind: type, wanted: str) -> Any:
        value = self.get(key)
        if value is not None and not isinstance(value, kind):
            raise unusable(key, value, wanted)
        return value

    def integer(self, key: str, minimum: int = 1, maximum: int = LARGEST) -> int:
        value = self.get(key)
        if not _is_int(value) or not minimum <= value <= maximum:
            raise unusable(key, value, f"an integer from {minimum} to {maximum}")
        return int(value)

    def optional_integer(self, key: str, minimum: int = 1) -> int | None:
        return None if self.get(key) is None else self.integer(key, minimum)

    def number(self, key: str) -> float:
        return _positive(key, self.get(key))

    def factor(self, key: str) -> float:
        """A positive factor; 1 without the key."""
        return 1.0 if self.get(key) is None else self.number(key)

    def mask_token_id(self) -> int:
        """The id itself: a token's *name* would need a tokenizer, and may land on an unrelated row."""
        value = self.get("mask_token_id")
        if not _is_int(value) or not 0 <= value <= LARGEST:
            raise unusable("mask_token_id", value, "the integer id that the drafter was trained with")
        return int(value)

    def target_layer_ids(self) -> tuple[int, ...]:
        value = self.get("target_layer_ids")
        listed = isinstance(value, list | tuple) and 0 < len(value) <= MOST_LAYERS
        if not listed or not all(_is_int(i) and 0 <= i <= LARGEST for i in value):
            raise unusable("target_layer_ids", value, "a list of layer numbers >= 0")
        if len(set(value)) != len(value):
            raise unusable("target_layer_ids", list(value), "distinct layer numbers")
        return tuple(value)

    def is_causal(self) -> bool | None:
        """Causality of all layers, which vLLM's readers also know as ``dflash_config.causal``."""
        stated: bool | None = self.optional("is_causal", bool, "true or false")
        other: bool | None = self.optional("causal", bool, "true or false")
        if stated is not None and other is not None and stated != other:
            raise unusable("is_causal", stated, f"the same as dflash_config.causal, which is {other}")
        return other if stated is None else stated

    def draft_vocab_size(self) -> int | None:
        """Size of a reduced vocabulary to draft from; None if the drafter drafts from the target's whole one."""
        size, whole = self.optional_integer("draft_vocab_size"), self.integer("vocab_size")
        if size is not None and size > whole:
            raise unusable("draft_vocab_size", size, f"up to vocab_size {whole}")
        return None if size == whole else size

    def layer_types(self) -> tuple[str, ...]:
        num_layers = self.integer("num_hidden_layers", maximum=MOST_LAYERS)
        value = self.get("layer_types")
        if value is None:
            if self.get("use_sliding_window"):
                raise unusable("layer_types", None, "one type per layer, as use_sliding_window is true")
            return (FULL,) * num_layers
        if not isinstance(value, list | tuple) or len(value) != num_layers:
            raise unusable("layer_types", value, f"a list of {num_layers} entries (num_hidden_layers)")
        if self.get("use_swa") and SLIDING not in value:
            # A ModelOpt export: its window is meant for layers that it calls full.
            raise unusable("layer_types", list(value), f"{SLIDING} for the layers that use_swa windows")
        if unknown := [kind for kind in value if kind not in (FULL, SLIDING)]:
            raise unusable("layer_types", unknown[0], f"{FULL} or {SLIDING}")
        return tuple(value)

    def rope(self, head_dim: int) -> tuple[float, int, dict[str, Any] | None]:
        """Base, turned dimensions and scaling, in today's spelling (``rope_parameters``) or the older one."""
        parameters = self.optional("rope_parameters", Mapping, "an object")
        if parameters is None:
            parameters = self.optional("rope_scaling", Mapping, "an object") or {}
        theta = _positive("rope_theta", parameters.get("rope_theta", self.get("rope_theta")))
        factor = parameters.get("partial_rotary_factor", self.get("partial_rotary_factor"))
        share = 1.0 if factor is None else _positive("partial_rotary_factor", factor)
        # rope_dim, if stated, is the trained width; the factor beside it is then a copy of the target's.
        rotary_dim = parameters.get("rope_dim", int(head_dim * share))
        if not _is_int(rotary_dim) or not 0 < rotary_dim <= head_dim or rotary_dim % 2:
            raise unusable("rope_dim", rotary_dim, f"an even number up to head_dim {head_dim}")
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if not isinstance(kind, str):
            raise unusable("rope_type", kind, "a name")
        if kind == "default":
            return theta, rotary_dim, None
        if kind == "yarn":
            factor, trained = (
                _positive(f"rope_parameters.{key}", parameters.get(key))
                for key in ("factor", "original_max_position_embeddings")
            )
            if factor * trained > MOST_POSITIONS:
                raise unusable("rope_parameters.factor", factor, f"at most {MOST_POSITIONS} positions in all")
        return theta, rotary_dim, {"rope_type": kind, **parameters}


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _positive(key: str, value: object) -> float:
    # Beyond float32 a number is infinite to the kernels; NaN compares as neither.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _LARGEST_FLOAT:
        raise unusable(key, value, "a positive number")
    return float(value)


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
