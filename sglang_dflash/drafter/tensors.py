"""The tensors of a drafter checkpoint. Others are refused: a drafter without its extra weights would silently draft
badly."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from sglang_dflash.drafter.config import DrafterConfig
from sglang_dflash.errors import DFlashError

# checkpoint module -> (fused module, shard)
_FUSED: dict[str, tuple[str, str | int]] = {
    **{f"{shard}_proj": ("qkv_proj", shard) for shard in "qkv"},
    **{"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)},
}
_WHOLE = ("base_kernel", "predecessor_codebook", "successor_codebook", "t2d")  # never quantised
_FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
TARGET_TO_DRAFT, DRAFT_TO_TARGET = "t2d", "d2t"

MAX_EMBEDDING = 16 << 20  # bytes
_DAMAGED = (
    AttributeError, EOFError, LookupError, OSError, RuntimeError, TypeError, ValueError, pickle.UnpicklingError,
)  # fmt: skip


def destination(name: str) -> tuple[str, str | int | None]:
    """Return parameter and shard of a checkpoint tensor: ``layers.0.mlp.up_proj.weight`` is shard 1 of gate_up."""
    for part in name.split("."):
        if part in _FUSED:
            fused, shard = _FUSED[part]
            return name.replace(part, fused), shard
    return name, None


def expected_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    if not config.num_layers:
        return {}
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_heads * head, config.num_kv_heads * head
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config.attention_bias:
        biased = (f"self_attn.{name}_proj" for name in "qkvo")
        layer |= {f"{module}.bias": layer[f"{module}.weight"][:1] for module in biased}
    if config.conv_taps:
        for convolution in ("attention_conv", "mlp_conv"):
            corrections = 2 * config.conv_taps * hidden // config.conv_group
            layer[f"{convolution}.base_kernel"] = (2, config.conv_taps, hidden)
            layer[f"{convolution}.kernel_projection.weight"] = (corrections, hidden)
    shapes = {f"layers.{i}.{name}": shape for i in range(config.num_layers) for name, shape in layer.items()}
    shapes["fc.weight"] = (hidden, len(config.target_layer_ids) * hidden)
    shapes["hidden_norm.weight"] = shapes["norm.weight"] = (hidden,)
    if rank := config.selector_rank:
        for codebook in ("predecessor_codebook", "successor_codebook"):
            shapes[f"candidate_selector.{codebook}"] = (config.vocab_size, rank)
        shapes["candidate_selector.hidden_projection.weight"] = (rank, hidden)
    if config.draft_vocab_size is not None:
        shapes[TARGET_TO_DRAFT] = (config.vocab_size,)
    return shapes


def copied_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of optional tensors that are not loaded."""
    if not config.copies_vocabulary:
        return {}
    drafted = config.draft_vocab_size or config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (config.vocab_size, config.hidden_size),
        HEAD: (drafted, config.hidden_size),
    }
    if config.draft_vocab_size is not None:
        shapes[DRAFT_TO_TARGET] = (drafted,)
    return shapes


class LoadReport:
    def __init__(self, config: DrafterConfig) -> None:
        self._expected, self._copied, self._stored = expected_shapes(config), copied_shapes(config), config.stored
        # SGLang's quantised layers: only module names are compared
        self._quantised = config.quantization is not None
        self._keys, self._loaded = set(map(self._key, self._expected)), set[str]()
        self._unexpected: list[str] = []
        self._misshaped: list[str] = []

    def place(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, str | int | None, Tensor]]:
        """Yield the tensors to load: parameter, shard, plain tensor. Record the others."""
        weights = ((name.removeprefix("model."), tensor) for name, tensor in weights)
        if self._stored is not None:
            weights = self._stored.plain(weights, self._expected, self._misshaped)
        for name, tensor in weights:
            if name.endswith("rotary_emb.inv_freq") or not self._accepts(name, tuple(tensor.shape)):
                continue
            if not self._quantised and name != TARGET_TO_DRAFT and tensor.dtype not in _FLOATS:
                # quantised values without a declared scale
                self._misshaped.append(f"{name} is of {tensor.dtype}, and config.json declares no quantisation")
                continue
            yield *destination(name), tensor

    def check(self, *, complete: bool) -> None:
        """Raise a DFlashError that names every unexpected, mis-shaped and, if ``complete``, missing tensor."""
        missing = sorted(self._keys - self._loaded) if complete else []
        found = {"missing": missing, "unexpected": self._unexpected, "mis-shaped": self._misshaped}
        problems = [f"{what}: {', '.join(sorted(names))}" for what, names in found.items() if names]
        if problems:
            raise DFlashError(
                f"the drafter's tensors do not fit its config.json ({'; '.join(problems)})",
                remedy="use its own config.json, or SGLANG_DFLASH=builtin for another type of drafter",
            )

    def _accepts(self, name: str, shape: tuple[int, ...]) -> bool:
        key, known = self._key(name), self._copied.get(name) or self._expected.get(name)
        if name not in self._copied and key not in self._keys:
            self._unexpected.append(name)
        elif known != shape and (name in self._copied or key == name or not self._quantised):
            self._misshaped.append(f"{name} is {list(shape)}, not {list(known or ())}")
        elif name not in self._copied:
            self._loaded.add(key)
            return True
        return False

    def _key(self, name: str) -> str:
        module, _, kind = name.rpartition(".")
        return module if self._quantised and kind not in _WHOLE else name


def load_mask_embedding(file: Path | None, config: DrafterConfig) -> Tensor | None:
    """Return ``mask_embedding.pt``, [H], which replaces the target's embedding of the mask token, or None.

    Raises:
        DFlashError: the file cannot be read, or does not fit ``config``.
    """
    if file is None:
        return None
    if file.stat().st_size > MAX_EMBEDDING:
        raise _unusable(file, f"is larger than {MAX_EMBEDDING >> 20} MiB")
    try:
        saved = torch.load(file, map_location="cpu", weights_only=True)
        embedding, token_id, shape = saved["embedding"], saved["mask_token_id"], list(saved["embedding"].shape)
    except _DAMAGED as error:
        raise _unusable(file, f"cannot be read ({str(error)[:200]})") from None
    per_position = saved.get("per_position")
    if per_position is not None and per_position is not False:
        raise _unusable(file, "has one embedding per position of the block, not one for all mask tokens")
    if token_id != config.mask_token_id:
        stated = f"config.json states {config.mask_token_id}"
        raise _unusable(file, f"was trained with mask_token_id {token_id}, and {stated}")
    if shape != [config.hidden_size]:
        raise _unusable(file, f"holds a tensor of shape {shape}, not [{config.hidden_size}], the hidden size")
    is_plain = embedding.layout == torch.strided and embedding.device.type == "cpu" and embedding.is_floating_point()
    if not is_plain or not embedding.isfinite().all():
        raise _unusable(file, f"holds {embedding.dtype} numbers, not finite floating-point numbers")
    return embedding


def _unusable(file: Path, problem: str) -> DFlashError:
    return DFlashError(f"{file} {problem}", remedy="download the drafter again, or ask its authors")
