"""The two models of a pair and the width file: each file is read once, at first use, and kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from sglang_dflash.drafter.checkpoint import ModelFiles
from sglang_dflash.drafter.config import DrafterConfig, text_config
from sglang_dflash.drafter.formats import kind_left_to_builtin
from sglang_dflash.errors import DFlashError
from sglang_dflash.plan.settings import Settings
from sglang_dflash.plan.widths import WidthConfig, read_config

DTYPE_BYTES = {
    "float32": 4, "bfloat16": 2, "float16": 2, "half": 2, "bf16": 2,
    "fp8_e4m3": 1, "fp8_e5m2": 1,
}  # fmt: skip
_LARGEST = 1 << 31
_BLOCK = 16  # SGLang's, where neither a flag nor the drafter states one


@dataclass(frozen=True)
class Pair:
    """Target and drafter. Reading an attribute for the first time may raise DFlashError."""

    target_files: ModelFiles
    drafter_files: ModelFiles
    # --json-model-override-args, which SGLang applies to both configurations.
    overrides: Mapping[str, Any] = field(default_factory=dict)
    width_file: str | None = None
    adaptive: bool = False

    @classmethod
    def of(cls, settings: Settings) -> Pair:
        drafter = settings.speculative_draft_model_path or ""
        return cls(
            ModelFiles(settings.model_path, settings.revision),
            ModelFiles(drafter, settings.speculative_draft_model_revision, settings.dequantises),
            settings.overrides,
            settings.speculative_adaptive_config,
            settings.speculative_adaptive,
        )

    def read(self) -> None:
        """Read both configurations and the width file now, so that errors in them are raised here."""
        _ = self.drafter, self.widths, self.hybrid

    @cached_property
    def target(self) -> Mapping[str, Any]:
        """The target's ``config.json``."""
        return {**self.target_files.config, **self.overrides}

    @cached_property
    def text(self) -> Mapping[str, Any]:
        """The target's language model within its ``config.json``."""
        return text_config(self.target)

    @cached_property
    def tokenizer(self) -> dict[str, Any] | None:
        """The target's ``tokenizer.json``; None without one."""
        return self.target_files.json("tokenizer.json")

    @cached_property
    def drafter(self) -> DrafterConfig:
        return DrafterConfig.from_dict({**self.drafter_files.config, **self.overrides})

    @cached_property
    def kind(self) -> str | None:
        """The family of a drafter that only SGLang's own worker serves; None for DFlash and DFlash2."""
        return kind_left_to_builtin(self.drafter_files.config)

    @cached_property
    def widths(self) -> WidthConfig | None:
        """The adaptive widths; None for a fixed block."""
        return read_config(self.width_file) if self.adaptive else None

    @cached_property
    def hybrid(self) -> bool:
        """Whether the target has recurrent layers."""
        return is_hybrid(self.target)

    @cached_property
    def loaded_files(self) -> ModelFiles:
        """The drafter's files as they are loaded: SGLang's own worker dequantises nothing."""
        return self.drafter_files if self.kind is None else replace(self.drafter_files, dequantise=False)

    def block_size(self, settings: Settings) -> int:
        """Positions of the widest block, anchor included."""
        return settings.block or self.drafter.block_size or _BLOCK

    def served_dtype(self, settings: Settings) -> str:
        """Return the dtype that SGLang computes in: its ``auto`` serves float32 checkpoints in float16."""
        if settings.dtype != "auto":
            return {"half": "float16", "float": "float32"}.get(settings.dtype, settings.dtype)
        stated = self.text.get("dtype") or self.text.get("torch_dtype") or self.target.get("dtype")
        return "float16" if stated in (None, "float32") else str(stated)

    def loaded_from(self, view: Path) -> Pair:
        """The same pair, whose drafter is loaded from its plain form in ``view``; the target is not read again."""
        return replace(self, drafter_files=replace(self.loaded_files, name=str(view), revision=None))


def count(text: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return a size from the target's configuration, or ``default`` if it is absent or 0; else raise DFlashError."""
    value = text.get(key)
    if default is not None and (value is None or value == 0):
        return default
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _LARGEST:
        return value
    raise DFlashError(
        f"{key} is {value!r} in the target's config.json",
        expected=f"an integer from 1 to {_LARGEST}",
        remedy="check the target's config.json",
    )


def full_layers(text: Mapping[str, Any]) -> int:
    """Return the number of the target's layers with K/V."""
    types = text.get("layer_types")
    if isinstance(types, list):
        return sum(kind != "linear_attention" for kind in types)
    return count(text, "num_hidden_layers") // count(text, "full_attention_interval", 1)


def is_hybrid(config: Mapping[str, Any]) -> bool:
    """Return whether a target has recurrent layers."""
    text = text_config(config)
    layers = text.get("num_hidden_layers")
    return isinstance(layers, int) and full_layers(text) < layers


def matrix_numbers(text: Mapping[str, Any], tp_size: int) -> int:
    """Return the numbers in a request's recurrent matrices (gated delta rule) on one rank, over all layers.

    0 for a dense target, and for one that does not state its heads.
    """
    layers = count(text, "num_hidden_layers") - full_layers(text)
    heads, value_dim, key_dim = (
        count(text, f"linear_{key}", 0) for key in ("num_value_heads", "value_head_dim", "key_head_dim")
    )
    return max(0, layers) * (heads // tp_size) * value_dim * key_dim
