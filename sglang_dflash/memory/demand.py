"""From configurations, headers and flags to the memory that SGLang divides."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from sglang_dflash.check.backends import needs_bfloat16_states
from sglang_dflash.check.text import served_dtype
from sglang_dflash.drafter.config import DrafterConfig, quantization, text_config
from sglang_dflash.drafter.files import ModelFiles, TensorHeader
from sglang_dflash.memory.device import Device
from sglang_dflash.memory.fit import Demand
from sglang_dflash.memory.parameters import drafter_parameters, target_parameters
from sglang_dflash.memory.sizes import DTYPE_BYTES, StateBytes, draft_kv_per_token, state_bytes, target_kv_per_token
from sglang_dflash.window.size import context_window, ring_slots

MAX_RUNNING = 48  # SGLang's for DFLASH, where --max-running-requests is not set
STATE_SHARE = 0.9  # SGLang's --mamba-full-memory-ratio
MEM_FRACTION = 0.85  # assumed here; SGLang computes one from the device and its graphs
_FLOATS = {"F64", "F32", "F16", "BF16"}


def demand(
    args: Any, drafter: DrafterConfig, drafter_files: ModelFiles, target_files: ModelFiles, device: Device | None
) -> Demand:
    """What one rank has to hold.

    Args:
        args: server arguments by SGLang's names.
        drafter: the parsed drafter configuration.
        drafter_files, target_files: where headers are read from, if there are any.
        device: the GPU, None on a CPU.
    """
    config, text = target_files.config, text_config(target_files.config)
    dtype, tp = served_dtype(config, args.dtype), args.tp_size
    kv_bytes = DTYPE_BYTES.get(args.kv_cache_dtype, DTYPE_BYTES[dtype])
    draft_kv_bytes = DTYPE_BYTES.get(args.speculative_draft_kv_cache_dtype or args.kv_cache_dtype, DTYPE_BYTES[dtype])
    state = _state(args, text, dtype, device)
    block = args.speculative_num_draft_tokens or args.speculative_dflash_block_size or drafter.block_size or 16
    window = context_window(args.speculative_draft_window_size, drafter)
    context = args.context_length or text.get("max_position_embeddings") or drafter.max_position_embeddings
    return Demand(
        target_weights=_weights(target_files, target_parameters(config), dtype, quantization(config)) // tp,
        drafter_weights=_weights(drafter_files, drafter_parameters(drafter), dtype, drafter.quantization) // tp,
        target_kv=target_kv_per_token(text, kv_bytes=kv_bytes, tp_size=tp),
        draft_kv=draft_kv_per_token(drafter, kv_bytes=draft_kv_bytes, tp_size=tp),
        state=state,
        block=block,
        slots_per_request=slots_per_request(args),
        state_share=args.mamba_full_memory_ratio or STATE_SHARE,
        max_running=args.max_running_requests or MAX_RUNNING,
        max_tokens=args.max_total_tokens,
        max_states=args.max_mamba_cache_size,
        page=_page(args),
        ring=None if window is None else ring_slots(window, block=block, page=_page(args), context=int(context)),
    )


def slots_per_request(args: Any) -> int:
    """State slots of a running request: its own, the prefix cache's share, and the snapshots of ``extra_buffer``."""
    if args.disable_radix_cache:
        return 1
    if args.mamba_radix_cache_strategy == "no_buffer":
        return 3
    lazy = args.mamba_radix_cache_strategy == "extra_buffer_lazy"
    return 3 + (1 if lazy or args.disable_overlap_schedule else 2)


def _state(args: Any, text: Mapping[str, Any], dtype: str, device: Device | None) -> StateBytes:
    recurrent = (
        args.mamba_ssm_dtype
        or ("bfloat16" if needs_bfloat16_states(args, device) else None)
        or os.environ.get("SGLANG_MAMBA_SSM_DTYPE")
        or text.get("mamba_ssm_dtype")
        or "float32"
    )
    # SGLang keeps convolution inputs in bfloat16; the CPU platform in the model's dtype.
    conv = os.environ.get("SGLANG_MAMBA_CONV_DTYPE") or ("bfloat16" if device else dtype)
    return state_bytes(text, recurrent_bytes=DTYPE_BYTES[recurrent], conv_bytes=DTYPE_BYTES[conv], tp_size=args.tp_size)


def _page(args: Any) -> int:
    """``--page-size``, or what the backend forces."""
    backends = {args.attention_backend, args.prefill_attention_backend, args.decode_attention_backend}
    if "trtllm_mha" in backends | {args.speculative_draft_attention_backend}:
        return args.page_size if args.page_size in (16, 32, 64, 128) else 64
    return args.page_size or (128 if "fa4" in backends else 1)


def _weights(files: ModelFiles, parameters: int, dtype: str, quantized: str | None) -> int:
    """Bytes of a checkpoint as served: plain floats in ``dtype``, everything else as stored."""
    tensors = files.tensors()
    if tensors is None:
        return parameters * DTYPE_BYTES[dtype]
    return sum(
        _served_bytes(header, dtype, quantized)
        for name, header in tensors.items()
        if not name.startswith("mtp.")  # read only by multi-token prediction
    )


def _served_bytes(header: TensorHeader, dtype: str, quantized: str | None) -> int:
    if quantized is None and header.dtype in _FLOATS:
        return header.numel * DTYPE_BYTES[dtype]
    return header.num_bytes
