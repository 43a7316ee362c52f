"""The keys of a drafter's ``config.json``: their places and the values that each may hold.

DFLASH keys (``block_size``, ``mask_token_id``, ``target_layer_ids``, ``num_target_layers``, ``is_causal``)
stand in ``dflash_config`` or at the top level, the transformer's keys in ``text_config`` or at the top level;
published checkpoints use both.
"""

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
