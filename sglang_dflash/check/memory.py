"""Expected memory of one rank, from settings, configurations and headers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sglang_dflash.check.machine import highest_fraction, prefill_chunk
from sglang_dflash.check.pools import Pools, RequestState, Sizing, Sliding, fit
from sglang_dflash.check.sizes import (
    draft_kv_per_token,
    dtype_bytes,
    sharing_ranks,
    state_bytes,
    target_kv_per_token,
)
from sglang_dflash.drafter.checkpoint import ModelFiles
from sglang_dflash.drafter.config import DrafterConfig
from sglang_dflash.drafter.tensors import expected_shapes
from sglang_dflash.errors import Finding, warn
from sglang_dflash.launch.asked import Launch
from sglang_dflash.launch.choice import PROVEN, unproven_kind
from sglang_dflash.launch.division import EVICTED, SLIDING_SHARE, STATE_SHARE
from sglang_dflash.launch.layers import count
from sglang_dflash.launch.plan import draft_window
from sglang_dflash.launch.settings import in_transfer, slots_per_request
from sglang_dflash.launch.states import CONV_DTYPE, ring_length, state_dtype, states_kept_by

MEM_FRACTION = 0.85  # assumed; SGLang computes one from the device and its graphs
_FLOATS = {"F64", "F32", "F16", "BF16"}


@dataclass(frozen=True)
class MemoryTable:
    device: str
    static_bytes: int  # 0 if unknown
    fraction: float  # of the device's memory
    highest: float  # fraction that is proposed
    served: Pools
    other: Pools | None  # with a hybrid target's states stored the other way
    weighed: bool  # whether headers state the size of the weights


def unknown_size(launch: Launch) -> Finding | None:
    """Return a warning if the memory cannot be predicted."""
    remedy = "none needed: SGLang divides the memory when it starts"
    if kind := unproven_kind(launch.target):
        proven = f"a target that is {'; '.join(PROVEN)}"
        return warn(f"no sizes are known for a target with {kind}", expected=proven, remedy=remedy, about="memory")
    files = launch.target_files
    if files.tensors is None and not _stated_size(files):
        value = f"the size of the target's weights is unknown: {files.name} has no safetensors header or index"
        return warn(value, expected="a safetensors checkpoint", remedy=remedy, about="memory")
    return None


def expected_memory(launch: Launch, sizing: Sizing) -> MemoryTable:
    device, memory, highest = launch.device, launch.device.memory or 0, highest_fraction(launch)
    fraction = launch.settings.mem_fraction_static or (highest if device.is_unified else MEM_FRACTION)
    static = int(memory * fraction)
    served, other = divide(launch, sizing, static)
    name = device.name if memory else f"{device.name}: sizes only"
    return MemoryTable(name, static, fraction, highest, served, other, _is_weighed(launch))


def divide(launch: Launch, sizing: Sizing, static_bytes: float) -> tuple[Pools, Pools | None]:
    """Return the division as served, and with states stored the other way."""
    kept = fit(sizing, static_bytes)
    if not sizing.replayed.records:  # no verify, or Mamba2
        return kept, None
    replayed = fit(sizing, static_bytes, replay=True)
    return (kept, replayed) if states_kept_by(launch) else (replayed, kept)


def sizing_of(launch: Launch) -> Sizing:
    """Return what one rank stores and its limits."""
    settings, drafter, text = launch.settings, launch.drafter, launch.text
    dtype, tp, page, block = launch.dtype, settings.sharing, settings.page, launch.block
    kv_bytes, draft_kv_bytes = map(dtype_bytes, launch.kv_dtypes)
    kept, replayed = _request_states(launch)
    running, slots = settings.running, slots_per_request(settings)
    states = settings.max_mamba_cache_size and settings.max_mamba_cache_size // settings.groups
    context = settings.context_length or launch.context or drafter.max_position_embeddings
    target_kv, sliding_kv = target_kv_per_token(text, kv_bytes=kv_bytes, tp_size=tp)
    if settings.disable_hybrid_swa_memory:
        target_kv, sliding_kv = target_kv + sliding_kv, 0
    return Sizing(
        target_weights=_target_weights(launch, dtype),
        drafter_weights=_drafter_weights(drafter, dtype, tp),
        target_kv=target_kv,
        sliding=_sliding(launch, sliding_kv),
        draft_kv=draft_kv_per_token(drafter, kv_bytes=draft_kv_bytes, tp_size=tp),
        kept=kept,
        replayed=replayed,
        block=block,
        slots_per_request=slots,
        context=context,
        max_running=running,
        state_share=settings.mamba_full_memory_ratio or STATE_SHARE,
        max_tokens=settings.max_total_tokens,
        max_states=states or (running if slots == 1 else None),
        page=page,
        window=draft_window(launch),
        in_transfer=in_transfer(settings),
    )


def _sliding(launch: Launch, kv: int) -> Sliding | None:
    """Without a prefix cache SGLang sizes the pool for all requests (``compute_swa_request_cap``)."""
    if not kv:
        return None
    settings, window, block = launch.settings, count(launch.text, "sliding_window") - 1, launch.block
    page = settings.page
    cap = None
    if settings.disable_radix_cache or settings.disaggregation_mode == "decode":
        chunks = (1 if settings.disable_overlap_schedule else 2) * prefill_chunk(launch)
        waiting = (in_transfer(settings) or 0) * (window + page)
        most = settings.running * (window + (EVICTED + 2) * block + page)
        cap = most + (waiting if settings.disaggregation_mode == "decode" else chunks + page)
        cap = -(-cap // page) * page
    return Sliding(kv, window, settings.swa_full_tokens_ratio or SLIDING_SHARE, cap)


def _request_states(launch: Launch) -> tuple[RequestState, RequestState]:
    settings, block = launch.settings, launch.block
    conv = settings.variable(CONV_DTYPE) or ("bfloat16" if launch.device.kind == "gpu" else launch.dtype)
    dtypes = {"recurrent_bytes": dtype_bytes(state_dtype(launch)), "conv_bytes": dtype_bytes(conv)}
    state = state_bytes(launch.text, **dtypes, tp_size=settings.sharing)
    # a prefill server verifies nothing; SGLang's exceptions (_pd_prefill_skips_mamba_spec_state)
    may_verify = settings.enable_pd_role_switch or settings.enable_unified_memory
    if settings.disaggregation_mode == "prefill" and not may_verify:
        return RequestState(state.slot), RequestState(state.slot)
    # a verify keeps the state after every position, or what every token wrote in a ring
    kept, columns = block * state.recurrent, state.columns(block)
    if not state.record:  # Mamba2
        return (RequestState(state.slot, kept + columns),) * 2
    written = max(settings.linear_replayssm_cache_len, ring_length(block)) * state.record
    return RequestState(state.slot, kept + columns), RequestState(state.slot, written + columns, written)


def _is_weighed(launch: Launch) -> bool:
    settings = launch.settings
    quantised = (settings.quantization and launch.quantisation is None) or "quantization_config" in settings.overrides
    offloaded = settings.cpu_offload_gb > 0 or settings.offload_group_size > 0
    return launch.target_files.tensors is not None and not (quantised or offloaded)


def _target_weights(launch: Launch, dtype: str) -> int:
    # all ranks divide MLPs; ranks that serve the same requests divide the rest
    settings, whole = launch.settings, _all_bytes(launch, dtype)
    mlp = _mlp_bytes(launch, dtype) if settings.groups > 1 else whole
    return mlp // settings.tp_size + (whole - mlp) // settings.sharing


def _all_bytes(launch: Launch, dtype: str, part: str = "") -> int:
    headers = launch.target_files.tensors
    if headers is None:
        return _stated_size(launch.target_files)
    is_plain = launch.quantisation is None
    read = (header for name, header in headers.items() if part in name and not name.startswith("mtp."))
    return sum(  # plain floats in ``dtype``, everything else as stored
        int(each.numel * dtype_bytes(dtype)) if is_plain and each.dtype in _FLOATS else each.num_bytes for each in read
    )


def _mlp_bytes(launch: Launch, dtype: str) -> int:
    if launch.target_files.tensors is not None:
        return _all_bytes(launch, dtype, ".mlp.")
    if launch.quantisation is not None:
        return 0  # unknown
    text = launch.text
    experts = count(text, "num_experts", 0) * count(text, "moe_intermediate_size", 0)
    width = experts or count(text, "intermediate_size", 0)
    numbers = 3 * count(text, "num_hidden_layers") * count(text, "hidden_size") * width
    return min(int(numbers * dtype_bytes(dtype)), _stated_size(launch.target_files))


def _stated_size(files: ModelFiles) -> int:
    metadata = (files.index or {}).get("metadata")
    size = metadata.get("total_size") if isinstance(metadata, dict) else None
    return size if isinstance(size, int) else 0


def _drafter_weights(drafter: DrafterConfig, dtype: str, tp_size: int) -> int:
    shapes = expected_shapes(drafter).items()
    held = sum(math.prod(shape) // sharing_ranks(name, drafter, tp_size) for name, shape in shapes)
    return int(held * dtype_bytes(dtype))
