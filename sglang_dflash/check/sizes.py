"""Bytes per token or per request on one rank.

Formulas: SGLang 0.5.23's ``mem_cache/memory_pool.py``, and ``configs/mamba_utils.py`` for state shapes and replay
records.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_dflash.drafter.config import DrafterConfig
from sglang_dflash.errors import DFlashError
from sglang_dflash.launch.asked import DTYPE_BYTES
from sglang_dflash.launch.layers import count, layers_of


def dtype_bytes(name: Any) -> float:
    """Return the bytes per element, a fraction for block-scaled K/V; an unknown dtype is a DFlashError."""
    found = DTYPE_BYTES.get(name) if isinstance(name, str) else None
    if found is None:
        raise DFlashError(
            f"the dtype {name}",
            expected=f"one of {', '.join(DTYPE_BYTES)}",
            remedy="check --dtype, --mamba-ssm-dtype, SGLANG_MAMBA_CONV_DTYPE and the target's config.json",
        )
    return found


@dataclass(frozen=True)
class StateBytes:
    """One request's recurrent state over all linear layers of one rank, bytes."""

    recurrent: int  # the matrices
    conv: int  # the last conv_kernel - 1 inputs of the convolution
    conv_column: int  # one of them
    record: int = 0  # what one token writes: value, key and decay of every head; 0 if that is never replayed

    @property
    def slot(self) -> int:
        return self.recurrent + self.conv

    def columns(self, block: int) -> int:
        """Scratch for the inputs of a block's convolutions."""
        return self.conv + (block - 1) * self.conv_column


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
    of_full, of_sliding = (int(2 * n * _heads_per_rank(h, tp_size) * dim * kv_bytes) for n, h, dim in kinds)
    return of_full, of_sliding


def draft_kv_per_token(drafter: DrafterConfig, *, kv_bytes: float, tp_size: int) -> int:
    return int(2 * drafter.num_layers * _heads_per_rank(drafter.num_kv_heads, tp_size) * drafter.head_dim * kv_bytes)


def state_bytes(text: Mapping[str, Any], *, recurrent_bytes: float, conv_bytes: float, tp_size: int) -> StateBytes:
    """Return the recurrent state of one request in a target with gated delta nets or Mamba2, on one rank.

    An element of a record takes 4 bytes: SGLang stores 16-bit values and keys as two (``MambaPool.__init__``).
    """
    layers = layers_of(text)
    if layers.mamba:
        heads, head_dim, state = (count(text, key) for key in ("mamba_num_heads", "mamba_head_dim", "ssm_state_size"))
        groups = count(text, "n_groups")
        groups = tp_size if groups % tp_size else groups  # a copy on each rank
        column = int((heads * head_dim + 2 * groups * state) // tp_size * conv_bytes)
        matrices, record, window = heads // tp_size * head_dim * state, 0, count(text, "conv_kernel") - 1
    elif layers.delta:
        values, keys = count(text, "linear_num_value_heads"), count(text, "linear_num_key_heads")
        value_dim, key_dim = count(text, "linear_value_head_dim"), count(text, "linear_key_head_dim")
        column = int((2 * keys * key_dim + values * value_dim) // tp_size * conv_bytes)
        record = (values * (value_dim + 1) + keys * key_dim) // tp_size * 4
        matrices, window = values // tp_size * value_dim * key_dim, count(text, "linear_conv_kernel_dim") - 1
    else:
        return StateBytes(0, 0, 0)
    number = layers.mamba or layers.delta
    return StateBytes(*(number * each for each in (int(matrices * recurrent_bytes), window * column, column, record)))


def _heads_per_rank(heads: int, tp_size: int) -> int:
    return max(1, heads // tp_size)  # ranks beyond the number of KV heads repeat them


def sharing_ranks(name: str, config: DrafterConfig, tp_size: int) -> int:
    """Return the number of tensor-parallel ranks that divide a checkpoint tensor."""
    module, _, kind = name.rpartition(".")
    layer = module.rpartition(".")[2]
    if layer in ("k_proj", "v_proj"):
        return min(tp_size, config.num_kv_heads)
    is_divided = layer in ("q_proj", "gate_proj", "up_proj", "down_proj") or (layer, kind) == ("o_proj", "weight")
    return tp_size if is_divided else 1
