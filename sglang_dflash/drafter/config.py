"""The drafter's ``config.json``, parsed strictly: a missing value is an error, never a guess.

transformers may drop ``sliding_window``, although ``layer_types`` names sliding layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sglang_dflash.drafter.formats import (
    FULL,
    SLIDING,
    SOFTCAP,
    architecture,
    flat,
    kind_left_to_builtin,
    plain_form,
    require,
)
from sglang_dflash.drafter.quantisation import quantization
from sglang_dflash.errors import DFlashError

# sizes in a file are multiplied and allocated
_MAX_LAYERS = 1024
_MAX_POSITIONS = 1 << 24  # rows of a RoPE table
_Count = Annotated[int, Field(ge=1, le=1 << 31)]
_Index = Annotated[int, Field(ge=0, le=1 << 31)]
_Number = Annotated[float, Field(gt=0, lt=3e38)]  # kernels treat larger numbers as infinite


class DrafterConfig(BaseModel):
    """A drafter's configuration; every field has been checked.

    Attributes:
        block_size: tokens of one draft block, anchor included; None if not stated.
        target_layer_ids: target layers whose *output* is the drafter's input, 0-based, in ``fc``'s order.
        layer_types: ``full_attention`` or ``sliding_attention`` per drafter layer.
        sliding_window: tokens that a sliding layer attends to, the current one included.
        causal: whether a block position attends only to positions up to itself, per layer. By default sliding layers
            are causal and full layers bidirectional.
        output_scale, logit_cap: scale of the logits, and soft cap of the scaled ones. Without a selector they change
            only the margins.
        conv_taps, conv_group: positions that DFlash2's convolution reads, and channels that share a correction.
        selector_rank, selector_top_k: columns of the codebooks of DFlash2's selector, and candidates per position.
        draft_vocab_size: token ids that it drafts from, marked in its tensor ``t2d``.
        copies_vocabulary: whether it holds copies of the target's embedding and LM head, which are not loaded.
        quantization: method of a quantised checkpoint, which SGLang's quantised layers load.
        plain_modules: modules that such a checkpoint stores unquantised.
    """

    model_config = ConfigDict(strict=True, frozen=True)

    block_size: Annotated[int, Field(ge=2, le=1 << 31)] | None = None
    mask_token_id: _Index  # a token's name would need a tokenizer
    target_layer_ids: Annotated[tuple[_Index, ...], Field(strict=False, min_length=1, max_length=_MAX_LAYERS)]
    num_target_layers: _Count | None = None
    num_layers: Annotated[int, Field(alias="num_hidden_layers", ge=1, le=_MAX_LAYERS)]
    layer_types: Annotated[tuple[Literal["full_attention", "sliding_attention"], ...], Field(strict=False)] = Field(
        default_factory=lambda keys: (FULL,) * keys.get("num_layers", 0)
    )
    sliding_window: _Count | None = None
    is_causal: bool | None = None
    hidden_size: _Count
    intermediate_size: _Count
    num_heads: _Count = Field(alias="num_attention_heads")
    num_kv_heads: _Count = Field(alias="num_key_value_heads")
    head_dim: _Count
    vocab_size: _Count
    max_position_embeddings: Annotated[int, Field(ge=1, le=_MAX_POSITIONS)]
    rms_norm_eps: _Number
    attention_bias: bool = False
    rope_theta: _Number
    partial_rotary_factor: _Number = 1.0
    rope_dim: _Count | None = None  # the trained width; then partial_rotary_factor is the target's
    rope_scaling: dict[str, Any] | None = None
    input_scale: _Number = Field(1.0, alias="input_embedding_scale")
    output_multiplier: _Number = 1.0
    logit_scale: _Number = 1.0
    # DFlash2's kernels hold these in registers
    conv_taps: Annotated[int, Field(alias="conv_kernel_size", ge=0, le=16)] = 0
    conv_group: Annotated[int, Field(alias="conv_group_size", ge=0, le=1 << 31)] = 0
    selector_rank: Annotated[int, Field(ge=0, le=1024)] = 0
    selector_top_k: Annotated[int, Field(ge=0, le=64)] = 0
    logit_cap: _Number | None = Field(None, alias="final_logit_softcapping")
    draft_vocab_size: _Count | None = None
    copies_vocabulary: bool = False
    dtype: str | None = None
    quantization: str | None = None
    plain_modules: frozenset[str] = frozenset()

    @property
    def causal(self) -> tuple[bool, ...]:
        return tuple(kind == SLIDING if self.is_causal is None else self.is_causal for kind in self.layer_types)

    @property
    def rotary_dim(self) -> int:
        return self.rope_dim or int(self.head_dim * self.partial_rotary_factor)

    @property
    def output_scale(self) -> float:
        return self.output_multiplier * self.logit_scale

    @classmethod
    def none(cls, target: Mapping[str, Any]) -> DrafterConfig:
        """Return the configuration without a drafter: no layer, only the anchor."""
        return cls.model_construct(
            block_size=1,
            mask_token_id=0,
            target_layer_ids=(),
            num_layers=0,
            layer_types=(),
            hidden_size=0,
            num_kv_heads=0,
            head_dim=0,
            vocab_size=flat(target).get("vocab_size"),
            max_position_embeddings=_MAX_POSITIONS,
        )

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> DrafterConfig:
        """Parse a drafter's configuration in any trainer's form.

        Raises:
            DFlashError: as :func:`plain_form`; another type of drafter (:func:`kind_left_to_builtin`); or an unusable
                key.
        """
        config = plain_form(config)
        if kind := kind_left_to_builtin(config):
            raise DFlashError(
                f"unsupported drafter type: {kind}", remedy="serve it on a GPU, where SGLang's own worker supports it"
            )
        keys = flat(config)
        joined = _joined(keys) | {"quantization": quantization(config), "plain_modules": frozenset()}
        try:
            found = cls.model_validate(joined)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            key, expected = str(first["loc"][0]), first["msg"].removeprefix("Input should be ")
            require(False, key, joined.get(key), "as trained" if first["type"] == "missing" else expected)
            raise
        _check_together(found, keys, selects="DFlash2" in str(architecture(config)))
        return found


def _joined(keys: Mapping[str, Any]) -> dict[str, Any]:
    stated, other = keys.get("is_causal"), keys.get("causal")  # vLLM reads the second
    agree = stated is None or other is None or stated == other
    require(agree, "is_causal", stated, f"the same as dflash_config.causal, which is {other}")
    joined = {
        **keys,
        "is_causal": other if stated is None else stated,
        "dtype": keys.get("dtype", keys.get("torch_dtype")),
    }
    if not keys.get(SOFTCAP):
        joined.pop(SOFTCAP, None)
    if keys.get("draft_vocab_size") == keys.get("vocab_size"):
        joined.pop("draft_vocab_size", None)
    types = keys.get("layer_types")
    if types is None and keys.get("use_sliding_window"):
        require(False, "layer_types", None, "one type per layer, as use_sliding_window is true")
    if not (isinstance(types, list) and SLIDING in types):
        joined.pop("sliding_window", None)
    return joined | _rope(keys)


def _rope(keys: Mapping[str, Any]) -> dict[str, Any]:
    name = "rope_parameters" if "rope_parameters" in keys else "rope_scaling"
    rope = keys.get(name, {})
    require(isinstance(rope, Mapping), name, rope, "an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    require(isinstance(kind, str), "rope_type", kind, "a name")
    if kind == "yarn":
        for key in ("factor", "original_max_position_embeddings"):
            value = rope.get(key)
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 3e38
            require(is_number, f"rope_parameters.{key}", value, "a positive number")
        is_built = rope["factor"] * rope["original_max_position_embeddings"] <= _MAX_POSITIONS
        require(is_built, "rope_parameters.factor", rope["factor"], f"at most {_MAX_POSITIONS} positions in all")
    stated = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor", "rope_dim") if key in rope}
    return {**stated, "rope_scaling": None if kind == "default" else {"rope_type": kind, **rope}}


def _check_together(found: DrafterConfig, keys: Mapping[str, Any], *, selects: bool) -> None:
    def check(condition: object, key: str, expected: str) -> None:
        require(bool(condition), key, keys.get(key), expected)

    ids, types, whole = found.target_layer_ids, found.layer_types, found.vocab_size
    check(len(set(ids)) == len(ids), "target_layer_ids", "distinct layers")
    check(len(types) == found.num_layers, "layer_types", f"a list of {found.num_layers} entries (num_hidden_layers)")
    # a ModelOpt export's window applies to layers that it calls full
    check(not keys.get("use_swa") or SLIDING in types, "layer_types", f"{SLIDING} for the layers that use_swa windows")
    check(SLIDING not in types or found.sliding_window, "sliding_window", "the window of the sliding layers")
    multiple = f"a multiple of num_key_value_heads {found.num_kv_heads}"
    check(found.num_heads % found.num_kv_heads == 0, "num_attention_heads", multiple)
    rotary, head = found.rotary_dim, found.head_dim
    require(0 < rotary <= head and rotary % 2 == 0, "rope_dim", rotary, f"an even number up to head_dim {head}")
    check((found.draft_vocab_size or 0) <= whole, "draft_vocab_size", f"up to vocab_size {whole}")
    if found.conv_taps or found.conv_group:
        check(found.conv_taps, "conv_kernel_size", "the positions that the convolution reads")
        check(found.conv_group, "conv_group_size", "the channels that share a correction")
        divides = found.hidden_size % found.conv_group == 0
        check(divides, "conv_group_size", f"a divisor of hidden_size {found.hidden_size}")
    if found.selector_rank or found.selector_top_k or selects:
        check(found.draft_vocab_size is None, "draft_vocab_size", "the whole vocabulary with a candidate selector")
        check(found.selector_rank, "selector_rank", "the columns of the selector's codebooks")
        check(0 < found.selector_top_k <= whole, "selector_top_k", f"candidates, up to vocab_size {whole}")
