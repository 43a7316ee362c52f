"""From configurations, headers and flags to the memory that SGLang divides."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from sglang_dflash.drafter.checkpoint import TensorHeader, parse_object
from sglang_dflash.drafter.config import quantization, text_config
from sglang_dflash.drafter.tensors import copied_shapes, expected_shapes, sharing_ranks
from sglang_dflash.plan.machine import Machine
from sglang_dflash.plan.pair import Pair, block_size, needs_bfloat16_states, page_size, served_dtype
from sglang_dflash.plan.pools import Demand
from sglang_dflash.plan.replay import ring_length
from sglang_dflash.plan.sizes import (
    DTYPE_BYTES,
    MAX_RUNNING,
    count,
    draft_kv_per_token,
    dtype_bytes,
    in_transfer,
    slots_per_request,
    state_bytes,
    target_kv_per_token,
    target_parameters,
)
from sglang_dflash.plan.window import context_window, ring_slots

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
    # SGLang leaves the verify scratch of a prefill server out, except for these (_pd_prefill_skips_mamba_spec_state).
    keeps_scratch = args.enable_pd_role_switch or args.enable_unified_memory
    return Demand(
        target_weights=_target_weights(pair, dtype) // tp,
        drafter_weights=_drafter_weights(pair, dtype, tp),
        target_kv=target_kv_per_token(text, kv_bytes=kv_bytes, tp_size=tp),
        draft_kv=draft_kv_per_token(drafter, kv_bytes=draft_kv_bytes, tp_size=tp),
        state=states(recurrent_bytes=dtype_bytes(kept)),
        block=block,
        slots_per_request=slots,
        context=context,
        state_share=args.mamba_full_memory_ratio or STATE_SHARE,
        max_running=running,
        max_tokens=args.max_total_tokens,
        max_states=args.max_mamba_cache_size or (running if slots == 1 else None),
        page=page,
        ring=None if window is None else ring_slots(window, block=block, page=page, context=context),
        replayed=states(recurrent_bytes=dtype_bytes(replayed)),
        in_transfer=in_transfer(args),
        records=max(args.linear_replayssm_cache_len, ring_length(block)),
        copies=copies,
        weighed=_is_weighed(args, pair),
        verifies=args.disaggregation_mode != "prefill" or keeps_scratch,
    )


def _state_dtypes(args: Any, machine: Machine, text: Mapping[str, Any]) -> tuple[str, str]:
    """Dtypes of a recurrent state that is kept and of one that is replayed, which only the user takes off float32."""
    asked = args.mamba_ssm_dtype or ("bfloat16" if needs_bfloat16_states(args, machine) else None)
    kept = asked or os.environ.get("SGLANG_MAMBA_SSM_DTYPE") or text.get("mamba_ssm_dtype") or "float32"
    return kept, asked or "float32"


def _is_weighed(args: Any, pair: Pair) -> bool:
    """Whether the headers are read and the arguments make nothing smaller than what they describe."""
    quantised = args.quantization and quantization(pair.target) is None
    offloaded = args.cpu_offload_gb > 0 or args.offload_group_size > 0
    overridden = parse_object(args.json_model_override_args, "--json-model-override-args")
    return pair.target_files.tensors is not None and not (quantised or offloaded or overridden)


def _target_weights(pair: Pair, dtype: str) -> int:
    headers = pair.target_files.tensors
    if headers is None:
        return target_parameters(pair.target) * dtype_bytes(dtype)
    quantized = quantization(pair.target)
    read = (header for name, header in headers.items() if not name.startswith("mtp."))  # multi-token prediction's
    return sum(_loaded(header, dtype, quantized) for header in read)


def _drafter_weights(pair: Pair, dtype: str, tp_size: int) -> int:
    drafter, headers = pair.drafter, pair.drafter_files.tensors
    if drafter.stored is not None or headers is None:  # dequantised, or no header
        held = {name: math.prod(shape) * dtype_bytes(dtype) for name, shape in expected_shapes(drafter).items()}
    else:
        copied = copied_shapes(drafter)
        held = {
            name: _loaded(each, dtype, drafter.quantization) for name, each in headers.items() if name not in copied
        }
    return sum(size // sharing_ranks(name, drafter, tp_size) for name, size in held.items())


def _loaded(header: TensorHeader, dtype: str, quantized: str | None) -> int:
    """Bytes of a checkpoint tensor as served: plain floats in ``dtype``, everything else as stored."""
    return header.numel * dtype_bytes(dtype) if quantized is None and header.dtype in _FLOATS else header.num_bytes
