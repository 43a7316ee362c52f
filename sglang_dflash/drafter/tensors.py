"""The tensors of a drafter checkpoint: their shapes, and the parameter that each loads into.

Only the names of plain DFlash are known: what a checkpoint has beyond them is another kind of drafter, and
serving it without its extra weights would draft badly without a word.
"""

from __future__ import annotations

import pickle
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sglang_dflash.drafter.config import DrafterConfig
from sglang_dflash.drafter.dequantise import Quantised
from sglang_dflash.errors import DFlashError

# checkpoint module -> (the fused module that holds it, its shard there)
_FUSED: dict[str, tuple[str, str | int]] = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}


_FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
TARGET_TO_DRAFT, DRAFT_TO_TARGET = "t2d", "d2t"


def destination(name: str) -> tuple[str, str | int | None]:
    """Parameter and shard of a checkpoint tensor: ``layers.0.mlp.up_proj.weight`` is shard 1 of gate_up."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part in _FUSED:
            fused, shard = _FUSED[part]
            return ".".join((*parts[:i], fused, *parts[i + 1 :])), shard
    return name, None


def expected_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor that an unquantised checkpoint must have, by its name there."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_heads * head, config.num_kv_heads * head
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    for name, rows, columns in (
        ("q_proj", queries, hidden),
        ("k_proj", keys, hidden),
        ("v_proj", keys, hidden),
        ("o_proj", hidden, queries),
    ):
        layer[f"self_attn.{name}.weight"] = (rows, columns)
        if config.attention_bias:
            layer[f"self_attn.{name}.bias"] = (rows,)
    shapes = {f"layers.{i}.{name}": shape for i in range(config.num_layers) for name, shape in layer.items()}
    shapes["fc.weight"] = (hidden, len(config.target_layer_ids) * hidden)
    shapes["hidden_norm.weight"] = shapes["norm.weight"] = (hidden,)
    if config.draft_vocab_size is not None:
        shapes[TARGET_TO_DRAFT] = (config.vocab_size,)
    return shapes


def sharing_ranks(name: str, config: DrafterConfig, tp_size: int) -> int:
    """Return the number of tensor-parallel ranks that divide a checkpoint tensor; 1 if every rank holds all of it."""
    module, _, kind = name.rpartition(".")
    match module.rpartition(".")[2]:
        case "k_proj" | "v_proj":
            return min(tp_size, config.num_kv_heads)
        case "q_proj" | "gate_proj" | "up_proj" | "down_proj":
            return tp_size
        case "o_proj":
            return tp_size if kind != "bias" else 1
    return 1


def copied_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Shape of tensors that a checkpoint may have and that are not loaded: the target has them, or ``t2d`` says it."""
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


@dataclass
class LoadReport:
    """Compare a checkpoint's tensors with the ``expected`` shapes by name.

    What SGLang's quantised layers load is their business: there only the modules are compared.

    Attributes:
        quantized: whether such layers load it.
        copied: shapes of tensors that are known and not loaded.
        stored: quantisation of a checkpoint whose weights are dequantised.
    """

    expected: Mapping[str, tuple[int, ...]]
    quantized: bool
    copied: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    stored: Quantised | None = None
    loaded: set[str] = field(default_factory=set)
    unexpected: list[str] = field(default_factory=list)
    misshaped: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, config: DrafterConfig) -> LoadReport:
        return cls(expected_shapes(config), config.quantization is not None, copied_shapes(config), config.stored)

    def __post_init__(self) -> None:
        self._keys = set(map(self._key, self.expected))

    def accepts(self, name: str, shape: tuple[int, ...]) -> bool:
        """Note a checkpoint tensor; False if it must not be loaded."""
        key = self._key(name)
        if name in self.copied:
            if self.copied[name] != shape:
                self.misshaped.append(f"{name} is {list(shape)}, not {list(self.copied[name])}")
            return False
        if key not in self._keys:
            self.unexpected.append(name)
        elif not self.quantized and self.expected[name] != shape:
            self.misshaped.append(f"{name} is {list(shape)}, not {list(self.expected[name])}")
        else:
            self.loaded.add(key)
            return True
        return False

    def place(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, str | int | None, Tensor]]:
        """Yield the tensors to load: parameter, shard of it, plain tensor; note the rest for :meth:`check`."""
        weights = ((name.removeprefix("model."), tensor) for name, tensor in weights)
        if self.stored is not None:
            weights = self.stored.plain(weights, self.expected, self.misshaped)
        for name, tensor in weights:
            if name.endswith("rotary_emb.inv_freq") or not self.accepts(name, tuple(tensor.shape)):
                continue
            if not self.quantized and name != TARGET_TO_DRAFT and tensor.dtype not in _FLOATS:
                # As a weight its numbers lack the factor that makes them one.
                self.misshaped.append(f"{name} is of {tensor.dtype}, without a quantisation that says what it means")
                continue
            yield *destination(name), tensor

    def check(self, *, complete: bool) -> None:
        """Raise if anything was wrong, or if the checkpoint was to be complete and is not.

        Raises:
            DFlashError: naming every missing, unexpected and mis-shaped tensor.
        """
        missing = sorted(self._keys - self.loaded) if complete else []
        problems = [
            f"{what}: {', '.join(sorted(names))}"
            for what, names in (
                ("missing", missing),
                ("unexpected", self.unexpected),
                ("mis-shaped", self.misshaped),
            )
            if names
        ]
        if problems:
            raise DFlashError(
                f"the drafter's tensors do not fit its config.json ({'; '.join(problems)})",
                expected="the tensors of a plain DFlash drafter with this configuration",
                remedy="use its own config.json, or SGLANG_DFLASH=builtin for a drafter of another kind",
            )

    def _key(self, name: str) -> str:
        return (name.rpartition(".")[0] or name) if self.quantized else name


LARGEST_EMBEDDING = 16 << 20  # bytes
# What the readers of archives and of PyTorch's format raise on damaged ones.
_DAMAGED = (ArithmeticError, AssertionError, AttributeError, EOFError, ImportError, LookupError, NotImplementedError,
            OSError, RuntimeError, struct.error, TypeError, ValueError, zlib.error)  # fmt: skip


def load_mask_embedding(file: Path | None, config: DrafterConfig) -> Tensor | None:
    """Read ``mask_embedding.pt``, which some trainers of DFlash drafters write beside the weights.

    The target's own row is often an unused one, which nothing ever trained.

    Args:
        file: where it is; None if the checkpoint has none.
        config: the drafter's.

    Returns:
        [H], in the dtype of the file; None if the checkpoint has none.

    Raises:
        DFlashError: the file cannot be read, or was made for something else than ``config``.
    """
    if file is None:
        return None
    saved = _read(file)
    embedding, token_id, per_position = (saved.get(key) for key in ("embedding", "mask_token_id", "per_position"))
    if not isinstance(embedding, Tensor) or not isinstance(token_id, int):
        raise _unusable(file, "cannot be read (an entry is missing)", "a dict of embedding and mask_token_id")
    shape = tuple(embedding.shape)
    if per_position is not None and per_position is not False:
        raise _unusable(file, "has one embedding per position of the block", "one for all mask tokens")
    if token_id != config.mask_token_id:
        expected = f"mask_token_id {config.mask_token_id}, as in config.json"
        raise _unusable(file, f"was trained with mask_token_id {token_id}", expected)
    if shape != (config.hidden_size,):
        raise _unusable(file, f"holds a tensor of shape {list(shape)}", f"[{config.hidden_size}], the hidden size")
    plain = embedding.layout == torch.strided and embedding.device.type == "cpu" and embedding.is_floating_point()
    if not plain or not embedding.float().isfinite().all():
        raise _unusable(file, f"holds {embedding.dtype} numbers", "finite floating-point numbers")
    return embedding


def _read(file: Path) -> dict[str, Any]:
    """The file's content, in PyTorch's restricted reading, which makes tensors and plain values only.

    PyTorch believes what the file says of its sizes. So only the archives that ``torch.save`` writes are read, and no
    more than they hold: in its older format, and in a compressed archive, a small file can ask for any memory.
    """
    expected = f"what torch.save writes of an embedding, up to {LARGEST_EMBEDDING >> 20} MiB"
    try:
        is_plain = _is_plain(file)
        saved = torch.load(file, map_location="cpu", weights_only=True) if is_plain else None
    except (*_DAMAGED, zipfile.BadZipFile, pickle.UnpicklingError) as error:
        raise _unusable(file, f"cannot be read ({str(error)[:200]})", expected) from None
    if not is_plain:
        raise _unusable(file, "is compressed or too large", expected)
    if not isinstance(saved, dict):
        raise _unusable(file, f"holds a {type(saved).__name__}", "a dict of embedding and mask_token_id")
    return saved


def _is_plain(file: Path) -> bool:
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
    return stored and sum(entry.file_size for entry in entries) <= LARGEST_EMBEDDING


def _unusable(file: Path, problem: str, expected: str) -> DFlashError:
    return DFlashError(f"{file} {problem}", expected=expected, remedy="download the drafter again, or ask its authors")
