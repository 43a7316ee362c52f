"""From configurations, headers and flags to the memory that SGLang divides."""

from __future__ import annotations

import os
from collections.abc import Container, Mapping
from functools import partial
from typing import Any

from sglang_dflash.drafter.config import quantization, text_config
from sglang_dflash.drafter.files import ModelFiles
from sglang_dflash.drafter.tensors import copied_shapes
from sglang_dflash.memory.fit import Demand
from sglang_dflash.memory.machine import Machine
from sglang_dflash.memory.parameters import drafter_parameters, target_parameters
from sglang_dflash.memory.sizes import (
    DTYPE_BYTES,
    MAX_RUNNING,
    count,
    draft_kv_per_token,
    dtype_bytes,
    in_transfer,
    slots_per_request,
    state_bytes,
    target_kv_per_token,
)
from sglang_dflash.plan.pair import Pair, block_size, needs_bfloat16_states, page_size, served_dtype
from sglang_dflash.states.choice import ring_length
from sglang_dflash.window.size import context_window, ring_slots

STATE_SHARE = 0.9  # SGLang's --mamba-full-memory-ratio
_FLOATS = {"F64", "F32", "F16", "BF16"}


def demand(args: Any, machine: Machine, pair: Pair, *, copies: bool = False) -> Demand:
    """Compute the memory demand of one rank.

    Args:
        args: server arguments by SGLang's names.
        machine: what serves.
        copies: whether blocks are copied.

    Raises:
        DFlashError: a size or dtype in a configuration is unusable.
    """
    target, drafter = pair.target, pair.drafter
    text = text_config(target)
    dtype, tp, page = served_dtype(target, args.dtype), args.tp_size, page_size(args)
    drafters = args.speculative_draft_kv_cache_dtype or args.kv_cache_dtype
    kv_bytes, draft_kv_bytes = (
        DTYPE_BYTES.get(str(asked), dtype_bytes(dtype)) for asked in (args.kv_cache_dtype, drafters)
    )
    kept, replayed = _state_dtypes(args, machine, text)
    conv = os.environ.get("SGLANG_MAMBA_CONV_DTYPE") or ("bfloat16" if machine.kind == "gpu" else dtype)
    states = partial(state_bytes, text, conv_bytes=dtype_bytes(conv), tp_size=tp)
    block = block_size(args, drafter)
    running, slots = args.max_running_requests or MAX_RUNNING, slots_per_request(args)
    window = context_window(args.speculative_draft_window_size, drafter)
    context = args.context_length or count(text, "max_position_embeddings", drafter.max_position_embeddings)
    return Demand(
        target_weights=_weights(pair.target_files, target_parameters(target), dtype, quantization(target)) // tp,
        drafter_weights=_drafter_weights(pair, dtype) // tp,
        target_kv=target_kv_per_token(text, kv_bytes=kv_bytes, tp_size=tp),
        draft_kv=draft_kv_per_token(drafter, kv_bytes=draft_kv_bytes, tp_size=tp),
        state=states(recurrent_bytes=dtype_bytes(kept)),
        block=block,
        slots_per_request=slots,
        state_share=args.mamba_full_memory_ratio or STATE_SHARE,
        max_running=running,
        max_tokens=args.max_total_tokens,
        max_states=args.max_mamba_cache_size or (running if slots == 1 else None),
        page=page,
        ring=None if window is None else ring_slots(window, block=block, page=page, context=context),
        replayed=states(recurrent_bytes=dtype_bytes(replayed)),
        in_transfer=in_transfer(args),
        records=max(args.linear_replayssm_cache_len, ring_length(block)),
        copied_context=context if copies else None,
    )


def _state_dtypes(args: Any, machine: Machine, text: Mapping[str, Any]) -> tuple[str, str]:
    """Dtypes of a recurrent state that is kept and of one that is replayed, which only the user takes off float32."""
    asked = args.mamba_ssm_dtype or ("bfloat16" if needs_bfloat16_states(args, machine) else None)
    kept = asked or os.environ.get("SGLANG_MAMBA_SSM_DTYPE") or text.get("mamba_ssm_dtype") or "float32"
    return kept, asked or "float32"


def _drafter_weights(pair: Pair, dtype: str) -> int:
    drafter = pair.drafter
    parameters = drafter_parameters(drafter)
    if drafter.stored is not None:  # dequantised
        return parameters * dtype_bytes(dtype)
    return _weights(pair.drafter_files, parameters, dtype, drafter.quantization, copied_shapes(drafter))


def _weights(
    files: ModelFiles, parameters: int, dtype: str, quantized: str | None, not_loaded: Container[str] = ()
) -> int:
    """Bytes of a checkpoint as served: plain floats in ``dtype``, everything else as stored."""
    if files.tensors is None:
        return parameters * dtype_bytes(dtype)
    return sum(
        header.numel * dtype_bytes(dtype) if quantized is None and header.dtype in _FLOATS else header.num_bytes
        for name, header in files.tensors.items()
        if name not in not_loaded and not name.startswith("mtp.")  # read only by multi-token prediction
    )
