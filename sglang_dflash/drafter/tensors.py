"""The tensors of a drafter checkpoint. Unexpected ones are refused: a drafter without extra weights drafts badly."""

import pickle
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from sglang_dflash.drafter.checkpoint import TensorHeader
from sglang_dflash.drafter.config import DrafterConfig
from sglang_dflash.errors import DFlashError

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
# checkpoint module -> (fused module, shard)
_FUSED: dict[str, tuple[str, str | int]] = {
    **{f"{shard}_proj": ("qkv_proj", shard) for shard in "qkv"},
    **{"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)},
}
_FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_PLAIN = {"weight", "bias"}  # parts of an unquantised layer
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


def plain_modules(headers: Mapping[str, TensorHeader]) -> frozenset[str]:
    """Return the modules that a checkpoint stores unquantised: with a floating-point weight, and at most a bias."""
    parts = defaultdict[str, set[str]](set)
    for name, header in headers.items():
        module, _, part = name.removeprefix("model.").rpartition(".")
        parts[module].add(part if header.empty().dtype in _FLOATS else "quantised")
    return frozenset(name for name, found in parts.items() if found <= _PLAIN)


class LoadReport:
    """Compares a drafter's checkpoint with its configuration and, when it is loaded, with the model.

    Args:
        parameters: names of the model's parameters, which list the tensors of each quantised layer. Without them, a
            quantised layer needs at least one tensor.
    """

    def __init__(self, config: DrafterConfig, parameters: Iterable[str] = ()) -> None:
        expected, self._copied = expected_shapes(config), copied_shapes(config)
        self._expected: dict[str, tuple[int, ...] | None] = dict(expected)
        self._quantised, names = set[str](), list(parameters)
        weights = {name for name, shape in expected.items() if len(shape) == 2 and name.endswith(".weight")}
        matrices = {name.removesuffix(".weight") for name in weights} if config.quantization else set()
        for module in matrices - config.plain_modules:
            built = destination(f"{module}.")[0]
            parts = {name.removeprefix(built) for name in names if name.startswith(built)}
            if names and parts <= _PLAIN:
                continue  # a list of ignored layers names it
            self._quantised.add(module)
            del self._expected[f"{module}.weight"]
            for name in [f"{module}.{part}" for part in parts] or [module]:
                self._expected.setdefault(name)
        self._parts = defaultdict[str, set[str]](set)
        self._loaded = set[str]()
        self._unexpected: list[str] = []
        self.misshaped: list[str] = []

    def place(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, str | int | None, Tensor]]:
        """Yield the tensors to load: parameter, shard, tensor. Record the others."""
        for name, tensor in weights:
            name = name.removeprefix("model.")
            if not name.endswith("rotary_emb.inv_freq") and self._accepts(name, tensor):
                yield *destination(name), tensor

    def check(self, *, complete: bool) -> None:
        """Raise a DFlashError that names every unexpected, mis-shaped and, if ``complete``, missing tensor."""
        missing = self._expected.keys() - self._loaded if complete else ()
        found = {"missing": missing, "unexpected": self._unexpected, "mis-shaped": self.misshaped}
        found["without a scale"] = [name for name in self._quantised if self._parts[name] == {"weight"}]
        problems = [f"{what}: {', '.join(sorted(names))}" for what, names in found.items() if names]
        problems += self._unequal() if complete else ()
        if problems:
            lists = ", in which a list of ignored layers names those that are stored plain" if self._quantised else ""
            raise DFlashError(
                f"the drafter's tensors do not fit its config.json ({'; '.join(problems)})",
                remedy=f"use its own config.json{lists}, or SGLANG_DFLASH=builtin for another type of drafter",
            )

    def _unequal(self) -> Iterator[str]:
        for fused, shards in PACKED.items():
            for first in (name for name in self._parts if name.endswith(shards[0])):
                parts = {shard: self._parts[first.removesuffix(shards[0]) + shard] for shard in shards}
                if len({*map(frozenset, parts.values())}) > 1:
                    stored = ", ".join(f"{shard} as {' and '.join(sorted(names))}" for shard, names in parts.items())
                    yield f"one layer {fused} is stored in unlike ways: {stored}"

    def _accepts(self, name: str, tensor: Tensor) -> bool:
        module, _, part = name.rpartition(".")
        shape, quantised = tuple(tensor.shape), module in self._quantised
        key = module if quantised and module in self._expected else name
        if name in self._copied:
            known: tuple[int, ...] | None = self._copied[name]
        elif key in self._expected:
            known = self._expected[key]
            self._loaded.add(key)
            self._parts[module].add(part)
        else:
            self._unexpected.append(name)
            return False
        if known is not None and known != shape:
            self.misshaped.append(f"{name} is {list(shape)}, not {list(known)}")
        elif name in self._copied:
            return False
        elif quantised and part == "weight" and tensor.dtype in _FLOATS:
            self.misshaped.append(f"{name} is of {tensor.dtype}, in a quantised layer")
        elif not quantised and name != TARGET_TO_DRAFT and tensor.dtype not in _FLOATS:
            self.misshaped.append(f"{name} is of {tensor.dtype}, and config.json declares no quantisation of it")
        else:
            return True
        return False


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
