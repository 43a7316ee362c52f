"""Sizes and layers of a target, from its ``config.json``, and the bytes that one rank keeps per token and per request.

Formulas: SGLang 0.5.23's ``mem_cache/memory_pool.py``, and ``configs/mamba_utils.py`` for state shapes and replay
records.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_dflash.drafter.formats import SLIDING
from sglang_dflash.errors import DFlashError

DTYPE_BYTES: dict[str, float] = {
    "float32": 4,
    **dict.fromkeys(("bfloat16", "float16", "half", "bf16"), 2),
    **dict.fromkeys(("fp8_e4m3", "fp8_e5m2"), 1),
    "mxfp8": 33 / 32,  # scales included
    **dict.fromkeys(("nvfp4", "fp4_mx_block16"), 9 / 16),
}
_MAX_SIZE = 1 << 31


def count(text: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return a size, or ``default`` if it is absent or 0; else raise DFlashError."""
    value = text.get(key)
    if default is not None and (value is None or value == 0):
        return default
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _MAX_SIZE:
        return value
    raise DFlashError(
        f"{key} is {value!r} in the target's config.json, not an integer from 1 to {_MAX_SIZE}",
        remedy="check the target's config.json",
    )


@dataclass(frozen=True)
class Layers:
    """Layers of a target by what they store per request: K/V of all tokens or of a window, or a recurrent state."""

    full: int
    sliding: int = 0
    delta: int = 0  # gated delta net


def layers_of(text: Mapping[str, Any]) -> Layers:
    """Count the layers of a target."""
    names = text.get("layer_types")
    kinds = Counter(map(str, names if isinstance(names, list) else ()))
    if not kinds:
        layers = count(text, "num_hidden_layers")
        full = layers // count(text, "full_attention_interval", 1)
        return Layers(full, delta=layers - full)
    sliding, delta = kinds[SLIDING], kinds["linear_attention"]
    return Layers(kinds.total() - sliding - delta, sliding, delta)


def dtype_bytes(name: Any) -> float:
    """Return the bytes per element, a fraction for block-scaled K/V; an unknown dtype is a DFlashError."""
    found = DTYPE_BYTES.get(name) if isinstance(name, str) else None
    if found is None:
        raise DFlashError(
            f"the dtype {name} is none of {', '.join(DTYPE_BYTES)}",
            remedy="check --dtype, --mamba-ssm-dtype, SGLANG_MAMBA_CONV_DTYPE and the target's config.json",
        )
    return found


def target_kv_per_token(text: Mapping[str, Any], *, kv_bytes: float, tp_size: int) -> tuple[int, int]:
    """Return the bytes per token in the pool of full layers, and in that of sliding layers.

    Latent K/V (MLA) are whole on every rank. Gemma 4 has other heads in its full layers; its configuration states those
    of its sliding layers without a prefix (SGLang's ``_apply_gemma4_attention_overrides``).
    """
    layers = layers_of(text)
    if rank := count(text, "kv_lora_rank", 0):
        return int(layers.full * (rank + count(text, "qk_rope_head_dim", 0)) * kv_bytes), 0
    heads = count(text, "num_key_value_heads", 0) or count(text, "num_attention_heads")
    head_dim = count(text, "head_dim", 0) or count(text, "hidden_size") // count(text, "num_attention_heads")
    full = heads, head_dim
    if str(text.get("model_type")).startswith("gemma4"):
        other = text.get("attention_k_eq_v") and count(text, "num_global_key_value_heads", 0)
        full = other or heads, count(text, "global_head_dim", 512)
    kinds = ((layers.full, *full), (layers.sliding, heads, head_dim))
    of_full, of_sliding = (int(2 * n * heads_per_rank(h, tp_size) * dim * kv_bytes) for n, h, dim in kinds)
    return of_full, of_sliding


def state_bytes(
    text: Mapping[str, Any], *, recurrent_bytes: float, conv_bytes: float, tp_size: int
) -> tuple[int, int, int, int]:
    """Return the recurrent state of one request over all gated delta nets, on one rank.

    The parts, in bytes: the matrices; the last ``conv_kernel - 1`` inputs of the convolutions; one of these inputs; and
    what one token writes for a replay (value, key and decay of every head). An element of the last takes 4 bytes:
    SGLang stores 16-bit values and keys as two (``MambaPool.__init__``).
    """
    if not (layers := layers_of(text).delta):
        return 0, 0, 0, 0
    values, keys = count(text, "linear_num_value_heads"), count(text, "linear_num_key_heads")
    value_dim, key_dim = count(text, "linear_value_head_dim"), count(text, "linear_key_head_dim")
    column = layers * int((2 * keys * key_dim + values * value_dim) // tp_size * conv_bytes)
    record = layers * ((values * (value_dim + 1) + keys * key_dim) // tp_size * 4)
    matrices = layers * int(values // tp_size * value_dim * key_dim * recurrent_bytes)
    return matrices, (count(text, "linear_conv_kernel_dim") - 1) * column, column, record


def heads_per_rank(heads: int, tp_size: int) -> int:
    return max(1, heads // tp_size)  # ranks beyond the number of KV heads repeat them
