"""Drafter configurations: the keys of ``config.json``, other trainers' forms of it, and drafters of other kinds.

DFLASH keys (``block_size``, ``mask_token_id``, ``target_layer_ids``, ``num_target_layers``, ``is_causal``) are in
``dflash_config`` or at the top level. The transformer's keys are in ``text_config`` or at the top level. Published
checkpoints use both places.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_dflash.errors import DFlashError

FULL, SLIDING = "full_attention", "sliding_attention"
PLAIN = "DFlashDraftModel"
ARCHITECTURES = (PLAIN, "DFlash2DraftModel", "DFlash2BeamDraftModel", "MiniMaxDFlash2DraftModel")
INPUT_SCALE, OUTPUT_SCALES = "input_embedding_scale", ("output_multiplier", "logit_scale")
# Limits: sizes in a file are multiplied and allocated.
LARGEST = 1 << 31  # of a count
MOST_LAYERS = 1024
MOST_POSITIONS = 1 << 24  # rows of a RoPE table
MOST_TAPS, MOST_CANDIDATES, LARGEST_RANK = 16, 64, 1024  # of DFlash2, whose kernels hold them in registers
_LARGEST_FLOAT = 3e38  # of float32

# Keys of drafters of other kinds, which have additional layers or inputs.
_OTHER_KEYS = (
    *("lilicorr_hidden_size", "has_embed_tokens", "use_gemma_norm", "attention_sink_bias", "attention_value_scale"),
)
_AUTHORS = "use the target's DFlash or DFlash2 drafter, or serve this one with its authors' engine"
_NORMALIZE = "convert it with SpecForge's scripts/gates/normalize_dflash_export.py and serve it with "
# Architecture or key -> kind that SGLang does not serve as DFLASH, and the remedy.
_UNSERVED = {
    "thresh_head_direct_len": ("AdaFlash (head for the length of a block), which SGLang does not serve", _AUTHORS),
    "Qwen3XPressModel": ("XPress (refinement head), which SGLang does not serve", _AUTHORS),
    "DSparkDraftModel": ("DSpark (Markov head), as SpecForge writes it", f"{_NORMALIZE}--speculative-algorithm DSPARK"),
}
_SPECULATORS = "speculators_model_type"
_AUTOMODEL_CLASSES = {"Qwen3DFlashDraftModel": PLAIN, "Qwen3DFlash2DraftModel": "DFlash2DraftModel"}
_CLASSES = {**_AUTOMODEL_CLASSES, "DominoDraftModel": PLAIN}  # the last is SpecForge's
_SELECTOR, SOFTCAP = ("selector_rank", "selector_top_k"), "final_logit_softcapping"
_DFLASH2 = ("conv_kernel_size", "conv_group_size", *_SELECTOR, SOFTCAP)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's part: ``text_config`` of a multimodal model, otherwise ``config``."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def kind_left_to_builtin(config: Mapping[str, Any]) -> str | None:
    """Name the kind of a drafter that SGLang serves as DFLASH and this package does not; None for DFlash and DFlash2.

    Only ``config.json`` is read; the loader finds undeclared extra tensors.
    """
    name, keys = _architecture(config), ConfigKeys(config)
    if name not in ARCHITECTURES:
        return name or "unknown"
    other = _OTHER_KEYS if any(map(keys.get, _SELECTOR)) else (*_OTHER_KEYS, SOFTCAP)
    if key := next(filter(keys.get, other), None):
        return f"DFlash with {key}"
    head, activation = keys.get("projector_type"), keys.get("hidden_act")
    if head not in (None, "dflash"):
        return f"DFlash with the head {head}"
    if keys.get("sample_from_anchor") is False:
        return "DFlash with sample_from_anchor false"
    return None if activation in (None, "silu") else f"DFlash with the activation {activation}"


def plain_form(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration that z-lab would have written for the same drafter; an equal one if it is plain.

    Raises:
        DFlashError: the trainer's form cannot be served.
    """
    if _SPECULATORS in config:
        return _from_speculators(config)
    keys, name, dflash = ConfigKeys(config), _architecture(config), config.get("dflash_config")
    if unserved := next((each for mark, each in _UNSERVED.items() if mark == name or keys.get(mark)), None):
        kind, remedy = unserved
        raise DFlashError(f"the drafter is of the kind {kind}", expected="a DFlash or DFlash2 drafter", remedy=remedy)
    changes: dict[str, Any] = {"architectures": [_CLASSES[name]]} if name in _CLASSES else {}
    if name in _AUTOMODEL_CLASSES and isinstance(dflash, Mapping) and dflash.get("causal") is True:
        # AutoModel's JetSpec recipe: is_causal false is left over from the DFlash recipe that it extends.
        changes["is_causal"] = True
    window, types = keys.get("swa_window_size"), keys.get("layer_types")
    if keys.get("use_swa") and window is not None and isinstance(types, list) and set(map(str, types)) == {FULL}:
        # Model Optimizer's window holds for every layer and counts the current token, as ours does.
        changes |= {"layer_types": [SLIDING] * len(types), "sliding_window": window}
    return {**config, **changes}


def _from_speculators(config: Mapping[str, Any]) -> dict[str, Any]:
    algorithm, ffn = config[_SPECULATORS], config.get("draft_ffn_type")
    if algorithm not in ("dflash", "dflash2"):
        raise _unserved_by_speculators(f"{_SPECULATORS} {algorithm!r}", "dflash or dflash2")
    if ffn == "moe":
        raise _unserved_by_speculators(f"draft_ffn_type {ffn!r}", "an MLP in every layer")
    layers: Any = config.get("transformer_layer_config")
    require(isinstance(layers, Mapping), "transformer_layer_config", layers, "an object: the drafter's transformer")
    if config.get("sample_from_anchor"):
        raise _unserved_by_speculators("sample_from_anchor true", "false: only mask tokens draft")
    keys = ConfigKeys({**layers, **config})
    target_size, size = keys.get("target_hidden_size"), keys.get("hidden_size")
    if target_size not in (None, size):
        found = f"target_hidden_size {target_size!r}, hidden_size {size!r}"
        raise _unserved_by_speculators(found, "the same for both")
    kept = ("block_size", "mask_token_id", "draft_vocab_size", INPUT_SCALE, *OUTPUT_SCALES, *_DFLASH2)
    dflash = {
        **{key: config[key] for key in kept if key in config},
        "target_layer_ids": _layers_before(config.get("aux_hidden_state_layer_ids")),
        "copies_vocabulary": True,
    }
    second = algorithm == "dflash2"
    if config.get("sliding_window_non_causal", second):  # the default of each kind
        dflash["causal"] = False
    quantization = config.get("quantization_config")
    return {
        **layers,
        "architectures": ["DFlash2DraftModel" if second else PLAIN],
        "model_type": "qwen3",  # for every target: the drafter's layers are Qwen3's
        "dtype": config.get("dtype") or config.get("torch_dtype"),
        **_rope_of_speculators(layers),
        **({"quantization_config": quantization} if quantization else {}),
        "dflash_config": dflash,
    }


def _layers_before(ids: Any) -> list[int]:
    key = "aux_hidden_state_layer_ids"  # hidden state 2 is the output of layer 1
    require(isinstance(ids, list) and all(map(_is_int, ids)), key, ids, "a list of hidden states' numbers")
    expected = "numbers from 1 on: 0 is the embedding's output, which SGLang does not capture"
    require(min(ids, default=1) > 0, key, ids, expected)
    return [i - 1 for i in ids]


def _rope_of_speculators(layers: Mapping[str, Any]) -> dict[str, Any]:
    # The trainer runs one RoPE for all layers, over the whole head, with positions in one dimension. Other keys may be
    # copies of a multimodal target's.
    parameters = layers.get("rope_parameters")
    if not isinstance(parameters, Mapping):
        return {}
    nested = parameters.get(SLIDING)
    used = nested if isinstance(nested, Mapping) else parameters
    foreign = ("mrope_section", "mrope_interleaved", "partial_rotary_factor")
    return {"rope_parameters": {key: value for key, value in used.items() if key not in foreign}}


def _unserved_by_speculators(found: str, expected: str) -> DFlashError:
    return DFlashError(
        f"{found} in the drafter's config.json, which speculators wrote",
        expected=expected,
        remedy="serve it with vLLM, or train a DFlash drafter without this",
    )


class ConfigKeys:
    """Typed look-ups in one drafter configuration; every method raises as :func:`require`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        nested = config.get("dflash_config")
        self._places = (nested if isinstance(nested, Mapping) else {}, text_config(config), config)

    def get(self, key: str) -> Any:
        return next((place[key] for place in self._places if place.get(key) is not None), None)

    def optional(self, key: str, kind: type, wanted: str) -> Any:
        value = self.get(key)
        require(value is None or isinstance(value, kind), key, value, wanted)
        return value

    def boolean(self, key: str) -> bool | None:
        stated: bool | None = self.optional(key, bool, "true or false")
        return stated

    def integer(self, key: str, minimum: int = 1, maximum: int = LARGEST) -> int:
        value = self.get(key)
        in_range = _is_int(value) and minimum <= value <= maximum
        require(in_range, key, value, f"an integer from {minimum} to {maximum}")
        return int(value)

    def optional_integer(self, key: str, minimum: int = 1) -> int | None:
        return None if self.get(key) is None else self.integer(key, minimum)

    def number(self, key: str) -> float:
        return _positive(key, self.get(key))

    def factor(self, key: str) -> float:
        """A positive factor; 1 without the key."""
        return 1.0 if self.get(key) is None else self.number(key)

    def target_layer_ids(self) -> tuple[int, ...]:
        value = self.get(key := "target_layer_ids")
        is_list = isinstance(value, list | tuple) and 0 < len(value) <= MOST_LAYERS
        are_layers = is_list and all(_is_int(i) and 0 <= i <= LARGEST for i in value)
        require(are_layers and len(set(value)) == len(value), key, value, "a list of distinct layer numbers >= 0")
        return tuple(value)

    def is_causal(self) -> bool | None:
        """Causality of all layers; vLLM also reads it from ``dflash_config.causal``."""
        stated, other = self.boolean("is_causal"), self.boolean("causal")
        agree = stated is None or other is None or stated == other
        require(agree, "is_causal", stated, f"the same as dflash_config.causal, which is {other}")
        return other if stated is None else stated

    def draft_vocab_size(self) -> int | None:
        """Size of a reduced vocabulary; None if the drafter drafts from the target's whole vocabulary."""
        size, whole = self.optional_integer("draft_vocab_size"), self.integer("vocab_size")
        require(size is None or size <= whole, "draft_vocab_size", size, f"up to vocab_size {whole}")
        return None if size == whole else size

    def convolution(self) -> tuple[int, int] | None:
        """Taps of DFlash2's convolution, and channels per correction; None without it."""
        if not self.get("conv_kernel_size") and not self.get("conv_group_size"):
            return None
        hidden, group = self.integer("hidden_size"), self.integer("conv_group_size")
        require(hidden % group == 0, "conv_group_size", group, f"a divisor of hidden_size {hidden}")
        return self.integer("conv_kernel_size", maximum=MOST_TAPS), group

    def selector(self) -> tuple[int, int, float | None] | None:
        """Rank and candidates of DFlash2's selector, and the cap of its logits; None without a selector."""
        if not any(map(self.get, _SELECTOR)) and "DFlash2" not in str(_architecture(self._places[-1])):
            return None
        reduced = self.draft_vocab_size()
        require(reduced is None, "draft_vocab_size", reduced, "the target's whole vocabulary with a candidate selector")
        rank = self.integer("selector_rank", maximum=LARGEST_RANK)
        top_k = self.integer("selector_top_k", maximum=min(MOST_CANDIDATES, self.integer("vocab_size")))
        return rank, top_k, self.number(SOFTCAP) if self.get(SOFTCAP) else None

    def layer_types(self) -> tuple[str, ...]:
        num_layers = self.integer("num_hidden_layers", maximum=MOST_LAYERS)
        value = self.get(key := "layer_types")
        if value is None:
            windowed = self.get("use_sliding_window")
            require(not windowed, key, None, "one type per layer, as use_sliding_window is true")
            return (FULL,) * num_layers
        is_list = isinstance(value, list | tuple) and len(value) == num_layers
        require(is_list, key, value, f"a list of {num_layers} entries (num_hidden_layers)")
        # A ModelOpt export's window applies to layers that it calls full.
        windowed = not self.get("use_swa") or SLIDING in value
        require(windowed, key, value, f"{SLIDING} for the layers that use_swa windows")
        require(all(kind in (FULL, SLIDING) for kind in value), key, value, f"{FULL} or {SLIDING} for every layer")
        return tuple(value)

    def rope(self, head_dim: int) -> tuple[float, int, dict[str, Any] | None]:
        """Base, rotated dimensions and scaling, from ``rope_parameters`` or the older ``rope_scaling``."""
        parameters = self.optional("rope_parameters", Mapping, "an object")
        if parameters is None:
            parameters = self.optional("rope_scaling", Mapping, "an object") or {}
        theta = _positive("rope_theta", parameters.get("rope_theta", self.get("rope_theta")))
        factor = parameters.get("partial_rotary_factor", self.get("partial_rotary_factor"))
        share = 1.0 if factor is None else _positive("partial_rotary_factor", factor)
        # rope_dim, if stated, is the trained width; partial_rotary_factor is then a copy of the target's.
        rotary_dim = parameters.get("rope_dim", int(head_dim * share))
        is_even = _is_int(rotary_dim) and 0 < rotary_dim <= head_dim and rotary_dim % 2 == 0
        require(is_even, "rope_dim", rotary_dim, f"an even number up to head_dim {head_dim}")
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        require(isinstance(kind, str), "rope_type", kind, "a name")
        if kind == "default":
            return theta, rotary_dim, None
        if kind == "yarn":
            yarn = ("factor", "original_max_position_embeddings")
            factor, trained = (_positive(f"rope_parameters.{key}", parameters.get(key)) for key in yarn)
            is_built = factor * trained <= MOST_POSITIONS
            require(is_built, "rope_parameters.factor", factor, f"at most {MOST_POSITIONS} positions in all")
        return theta, rotary_dim, {"rope_type": kind, **parameters}


def require(condition: bool, key: str, value: object, expected: str) -> None:
    """Raise the error for a key that is missing (``value`` None) or has an unusable value unless ``condition``."""
    if condition:
        return
    found = "is missing" if value is None else f"is {value!r}"
    raise DFlashError(
        f"{key} {found} in the drafter's config.json",
        expected=expected,
        remedy=f"use a drafter whose config.json states {key}, or add the value it was trained with",
    )


def _architecture(config: Mapping[str, Any]) -> str | None:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else None


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _positive(key: str, value: object) -> float:
    # Kernels treat numbers beyond float32 as infinite; every comparison with NaN is false.
    usable = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < _LARGEST_FLOAT
    require(usable, key, value, "a positive number")
    return float(value)  # type: ignore[arg-type]
