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
from sglang_dflash.plan.pair import DTYPE_BYTES, count, full_layers, matrix_numbers


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

    recurrent: int  # the gated delta rule's matrices
    conv: int  # the last conv_kernel - 1 inputs of the convolution
    conv_column: int  # one of them
    record: int = 0  # what one token writes: value, key and decay of every head

    @property
    def slot(self) -> int:
        return self.recurrent + self.conv

    def columns(self, block: int) -> int:
        """Scratch for the inputs of a block's convolutions."""
        return self.conv + (block - 1) * self.conv_column


def target_kv_per_token(text: Mapping[str, Any], *, kv_bytes: float, tp_size: int) -> int:
    heads = count(text, "num_key_value_heads", 0) or count(text, "num_attention_heads")
    head_dim = count(text, "head_dim", 0) or count(text, "hidden_size") // count(text, "num_attention_heads")
    return int(2 * full_layers(text) * _heads_per_rank(heads, tp_size) * head_dim * kv_bytes)


def draft_kv_per_token(drafter: DrafterConfig, *, kv_bytes: float, tp_size: int) -> int:
    return int(2 * drafter.num_layers * _heads_per_rank(drafter.num_kv_heads, tp_size) * drafter.head_dim * kv_bytes)


def state_bytes(text: Mapping[str, Any], *, recurrent_bytes: float, conv_bytes: float, tp_size: int) -> StateBytes:
    """Return the recurrent state of one request in a gated-delta-net target, on one rank.

    An element of a record takes 4 bytes: SGLang stores 16-bit values and keys as two (``MambaPool.__init__``).
    """
    layers = count(text, "num_hidden_layers") - full_layers(text)
    if layers <= 0:
        return StateBytes(0, 0, 0)
    values, keys = count(text, "linear_num_value_heads"), count(text, "linear_num_key_heads")
    value_dim, key_dim = count(text, "linear_value_head_dim"), count(text, "linear_key_head_dim")
    column = int((2 * keys * key_dim + values * value_dim) // tp_size * conv_bytes)
    conv = column * (count(text, "linear_conv_kernel_dim") - 1)
    record = (values * (value_dim + 1) + keys * key_dim) // tp_size * 4
    recurrent = int(matrix_numbers(text, tp_size) * recurrent_bytes)
    return StateBytes(recurrent, layers * conv, layers * column, layers * record)


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
