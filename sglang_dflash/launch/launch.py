"""A launch: the arguments, the two models of a pair, and the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from sglang_dflash.drafter.checkpoint import ModelFiles
from sglang_dflash.drafter.config import DrafterConfig
from sglang_dflash.drafter.formats import DRAFTERS, SLIDING, kind_left_to_builtin, text_config
from sglang_dflash.drafter.quantisation import declared, method_of
from sglang_dflash.drafter.tensors import plain_modules
from sglang_dflash.errors import DFlashError, first_true
from sglang_dflash.launch.attention import default_backend
from sglang_dflash.launch.device import Device
from sglang_dflash.launch.settings import DETERMINISTIC_FLAG, OVERRIDE_FLAG, Settings
from sglang_dflash.launch.sizes import DTYPE_BYTES, count, layers_of
from sglang_dflash.launch.width_config import read_config

# SGLang replaces others by FlashInfer
DRAFT_BACKENDS = {"flashinfer", "fa3", "fa4", "triton", "ascend", "trtllm_mha", "intel_xpu"}
OUR_BACKEND = "dflash"  # ops.block_attention
# sizes of the target's weights, with which the drafter was trained
_SHAPES = {
    "all layers": ("vocab_size", "num_hidden_layers", "layer_types", "full_attention_interval", "hidden_size"),
    "attention": ("num_attention_heads", "num_key_value_heads", "head_dim"),
    "heads of a delta net": ("linear_num_value_heads", "linear_num_key_heads"),
    "head size of a delta net": ("linear_value_head_dim", "linear_key_head_dim"),
    "MLP": ("intermediate_size", "num_experts", "moe_intermediate_size"),
}
_ROPE = ("rope_parameters", "rope_scaling")  # one value in transformers
_BLOCK = 16  # SGLang's default


@dataclass(frozen=True)
class Launch:
    """The settings, the target, the optional drafter, and the device of one rank.

    Each file is read once, at first use. Reading an attribute for the first time may raise DFlashError. SGLang changes
    the settings while it starts: cached properties keep their first value, plain ones read the settings again.
    """

    settings: Settings
    device: Device
    target_files: ModelFiles
    drafter_files: ModelFiles
    # None and False until SGLang has read the target
    sglangs_hybrid: bool | None = None  # whether SGLang found gated delta nets
    other_states: bool = False  # whether there are recurrent states other than those of gated delta nets

    @classmethod
    def of(cls, settings: Settings, device: Device) -> Launch:
        drafter, revision = settings.speculative_draft_model_path or "", settings.speculative_draft_model_revision
        target = ModelFiles(settings.model_path, settings.revision)
        return cls(settings, device, target, ModelFiles(drafter, revision))

    def changed(self, **changes: Any) -> Launch:
        """Return a launch of the same models with other arguments of SGLang."""
        return replace(self, settings=self.settings.changed(**changes))

    @property
    def has_drafter(self) -> bool:
        return bool(self.drafter_files.name)

    @cached_property
    def target(self) -> Mapping[str, Any]:
        config, overrides = self.target_files.config, self.settings.overrides
        _check_overrides(config, overrides)
        return overridden(config, overrides)

    @cached_property
    def text(self) -> Mapping[str, Any]:
        return text_config(self.target)

    @property
    def hybrid(self) -> bool:
        """Whether layers are gated delta nets."""
        if self.sglangs_hybrid is not None:
            return self.sglangs_hybrid
        return isinstance(self.text.get("num_hidden_layers"), int) and layers_of(self.text).delta > 0

    @cached_property
    def context(self) -> int:
        """The target's longest sequence, as SGLang's ``get_context_length`` derives it; 0 if not stated."""
        rope = _rope(self.text)
        is_whole = rope.get("rope_type") == "llama3" or "original_max_position_embeddings" in rope
        factor = 1 if is_whole else rope.get("factor")
        return int(count(self.text, "max_position_embeddings", 0) * (factor if isinstance(factor, int | float) else 1))

    @cached_property
    def quantisation(self) -> Mapping[str, Any] | None:
        return declared(self.target, self.target_files.json("hf_quant_config.json"))

    @cached_property
    def quantisation_method(self) -> str | None:
        return None if self.quantisation is None else method_of(self.quantisation)

    @cached_property
    def drafter(self) -> DrafterConfig:
        if not self.has_drafter:
            return DrafterConfig.none(self.target)
        files = self.drafter_files
        found = DrafterConfig.from_dict(files.config)
        if files.quantisation is None:
            return found
        plain = plain_modules(files.tensors or {})
        return found.model_copy(update={"quantization": method_of(files.quantisation), "plain_modules": plain})

    @cached_property
    def foreign_type(self) -> str | None:
        """The type of a drafter that only SGLang's own worker serves, or None."""
        return kind_left_to_builtin(self.drafter_files.config) if self.has_drafter else None

    @cached_property
    def widths(self) -> tuple[int, ...] | None:
        """None for a fixed block, without copies; empty for the default widths. Without a drafter it is adaptive."""
        adaptive = self.settings.speculative_adaptive or not self.has_drafter
        return read_config(self.settings.speculative_adaptive_config) if adaptive else None

    @property
    def block(self) -> int:
        """Positions of the widest block that is served: no wider than the widths in the width file."""
        block = self.settings.block or (self.has_drafter and self.drafter.block_size) or _BLOCK
        return min(block, max(2, *self.widths)) if self.widths else block

    @property
    def dtype(self) -> str:
        """The dtype that SGLang computes in: its ``auto`` serves float32 checkpoints in float16."""
        if (chosen := self.settings.dtype) != "auto":
            return {"half": "float16", "float": "float32"}.get(chosen, str(chosen))
        if self.quantisation_method == "mxfp4":
            return "bfloat16"  # SGLang's override for gpt-oss
        stated = self.text.get("dtype") or self.text.get("torch_dtype") or self.target.get("dtype")
        return "float16" if stated in (None, "float32") else str(stated)

    @property
    def draft_backend(self) -> str | None:
        """The drafter's attention backend; None for an unknown GPU.

        Ours is the default where SGLang chooses FlashInfer or Triton, and with one forward per step. Also for
        a bidirectional drafter under trtllm_mha, which counts the window of every position from the block's end.
        """
        chosen = self.settings.speculative_draft_attention_backend
        if chosen == OUR_BACKEND:
            return OUR_BACKEND
        found = self._sglangs_draft_backend
        # ours is not measured against these
        others = ("fa3", "fa4", "trtllm_mha") if self.settings.wants_one_forward else ()
        others = (*others, "trtllm_mha") if not all(self.drafter.causal) else others
        by_default = chosen is None and self.device.kind == "gpu" and found in ("flashinfer", "triton", *others)
        return OUR_BACKEND if by_default and self.backend_obstacle is None else found

    @property
    def backend_obstacle(self) -> str | None:
        """Why our attention backend cannot serve the drafter, or None."""
        settings, head_dim = self.settings, self.drafter.head_dim
        stored = settings.speculative_draft_kv_cache_dtype or settings.kv_cache_dtype
        obstacles = {
            f"the drafter's K/V are stored in {stored}": stored != "auto" and DTYPE_BYTES.get(stored) not in (1, 2, 4),
            f"head_dim of the drafter is {head_dim}": not is_tile(head_dim),
            "--enable-unified-memory translates slots": settings.enable_unified_memory,
            f"{DETERMINISTIC_FLAG}: its sums depend on the batch": settings.enable_deterministic_inference,
        }
        return first_true(obstacles)

    @property
    def _sglangs_draft_backend(self) -> str | None:
        # follows ``_resolve_dflash_draft_attention_backend``
        settings, capability = self.settings, self.device.capability
        backends = settings.prefill_attention_backend or settings.attention_backend
        chosen = settings.speculative_draft_attention_backend or backends
        if chosen is None and capability is not None:
            chosen = default_backend(self.text, self.device)
        slides = set(self.drafter.layer_types) == {SLIDING}
        if chosen == "trtllm_mha" and not (slides or self.drafter.is_causal):
            return "fa4" if capability is not None and capability[0] == 10 else "flashinfer"
        return chosen if chosen in {None, *DRAFT_BACKENDS} else "flashinfer"

    @property
    def kv_dtypes(self) -> tuple[str, str]:
        """For target and drafter, as SGLang's ``configure_kv_cache_dtype`` chooses them."""
        settings, served, chosen = self.settings, self.dtype, self.settings.kv_cache_dtype
        target = _kv_dtype(self.quantisation or {}, served) if chosen == "auto" else chosen
        chosen = settings.speculative_draft_kv_cache_dtype or chosen
        if self.draft_backend == "fa4":
            return target, served  # its kernels read K/V in the dtype of the queries
        return target, served if chosen == "auto" else chosen  # a drafter with scales for K/V is SGLang's worker's


def overridden(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Apply overrides as SGLang's ``get_config`` does: parts and top-level RoPE are merged, the rest replaced."""
    found = dict(config)
    for key, value in overrides.items():
        current = _rope(found) if key in _ROPE else found.get(key)
        if key in (*_ROPE, "text_config") and isinstance(value, Mapping) and isinstance(current, Mapping):
            replaced = _ROPE if value.keys() & set(_ROPE) else ()
            value = {**current, **dict.fromkeys(replaced), **value}
        found.update(dict.fromkeys(_ROPE) if key in _ROPE else {})
        found[key] = value
    return found


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return next((each for key in _ROPE if isinstance(each := config.get(key), Mapping)), {})


def _check_overrides(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    stated, given = (text_config(each) if "text_config" in config else each for each in (config, overrides))
    absent = [key for key in ("text_config", *DRAFTERS) if key in overrides and key not in config]
    changed = [key for keys in _SHAPES.values() for key in keys if key in given and given[key] != stated.get(key)]
    for key in [*absent, *changed]:
        remedy = "state its keys at the top level" if key == "text_config" else f"leave {key} out"
        own = f"set {key} in the drafter's config.json"
        raise DFlashError(
            f"{OVERRIDE_FLAG} sets {key} to {given.get(key)!r}, and the target's config.json has {stated.get(key)!r}",
            remedy=own if key in DRAFTERS else remedy,
        )


def is_tile(size: int) -> bool:
    """Return whether our attention kernel has tiles of this head size."""
    return 16 <= size <= 256 and size & (size - 1) == 0


def _kv_dtype(stored: Mapping[str, Any], served: str) -> str:
    scheme = stored.get("kv_cache_scheme")
    algorithm = stored.get("kv_cache_quant_algo")
    if str(stored.get("quant_method")).startswith("modelopt") and isinstance(scheme, Mapping):
        algorithm = "FP8" if (scheme.get("type"), scheme.get("num_bits")) == ("float", 8) else None
    return "fp8_e4m3" if str(algorithm).upper() == "FP8" else served
