"""Expected memory of one rank, from settings, configurations and headers.

Formulas: SGLang 0.5.23's ``mem_cache/memory_pool.py``, and ``configs/mamba_utils.py`` for state shapes and replay
records.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_dflash.check.machine import GIB, MIB
from sglang_dflash.check.pools import Pools, RequestState, Sizing, Sliding, fit
from sglang_dflash.drafter.checkpoint import ModelFiles
from sglang_dflash.drafter.config import DrafterConfig
from sglang_dflash.drafter.tensors import expected_shapes
from sglang_dflash.errors import DFlashError, Finding, warn
from sglang_dflash.launch.asked import DTYPE_BYTES, Launch
from sglang_dflash.launch.attention import default_backend
from sglang_dflash.launch.choice import unproven_kind
from sglang_dflash.launch.division import EVICTED, SLIDING_SHARE, STATE_SHARE
from sglang_dflash.launch.layers import count, layers_of
from sglang_dflash.launch.plan import ServingPlan, decide
from sglang_dflash.launch.settings import in_transfer, slots_per_request
from sglang_dflash.launch.states import CONV_DTYPE, ring_length, state_dtype

MEM_FRACTION = 0.85  # assumed; SGLang computes one from the device and its graphs
_FLOATS = {"F64", "F32", "F16", "BF16"}


_HIGHEST = 0.91  # fraction that is proposed
SMALL_CHUNK = 1024  # prefill chunk on cards that are nearly full of weights


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
        return warn(f"no sizes are known for a target with {kind}", remedy=remedy, about="memory")
    files = launch.target_files
    if files.tensors is None and not _stated_size(files):
        value = f"the size of the target's weights is unknown: {files.name} has no safetensors header or index"
        return warn(value, remedy=remedy, about="memory")
    return None


def expected_memory(launch: Launch) -> MemoryTable:
    device, memory, highest = launch.device, launch.device.memory or 0, highest_fraction(launch)
    fraction = launch.settings.mem_fraction_static or (highest if device.is_unified else MEM_FRACTION)
    static = int(memory * fraction)
    served, other = divide(sizing_of(launch), static)
    name = device.name if memory else f"{device.name}: sizes only"
    return MemoryTable(name, static, fraction, highest, served, other, _is_weighed(launch))


def highest_fraction(launch: Launch) -> float:
    """Return the largest proposed share of device memory for weights and pools.

    With unified memory, servers were killed at 0.85 on a DGX Spark, and none at 0.80 (SGLang's cookbook for
    Qwen3.8-27B). Otherwise graphs and activations of a prefill chunk need what SGLang's ``handle_gpu_memory_settings``
    estimates, and a step float32 logits of full blocks. On RTX 3090, 3.6 GiB outside were too few and 4.7 GB enough. On
    an RTX 5090 0.91 was enough for a chunk of 1,024, and 0.94 was not (the cookbook).
    """
    settings, device = launch.settings, launch.device
    if device.is_unified or not device.memory:
        return 0.8 if device.is_unified else _HIGHEST
    chunk = max(prefill_chunk(launch), SMALL_CHUNK)
    reserved = 512 + 1.5 * chunk + 128 * settings.tp_size * settings.pp_size + 2 * settings.running
    logits = 4 * count(launch.text, "vocab_size", 0) * settings.running * (settings.block or 16) / MIB
    share = 1 - (max(reserved, 10_240 if device.memory >= 60 * GIB else 0) + logits) * MIB / device.memory
    return min(_HIGHEST, max(0.0, math.floor(100 * share) / 100))


def prefill_chunk(launch: Launch) -> int:
    """Return the tokens of a prefill chunk; SGLang's default depends on the device's memory."""
    gib = (launch.device.memory or 0) // GIB
    chunk = next(size for least, size in ((160, 16384), (60, 8192), (20, 4096), (0, 2048)) if gib >= least)
    return launch.settings.chunked_prefill_size or chunk


def divide(sizing: Sizing, static_bytes: float) -> tuple[Pools, Pools | None]:
    """Return the division as served, and with states stored the other way."""
    kept = fit(sizing, static_bytes)
    if not sizing.replayed.records:  # no verify, or Mamba2
        return kept, None
    replayed = fit(sizing, static_bytes, replay=True)
    return (replayed, kept) if sizing.replays else (kept, replayed)


def sizing_of(launch: Launch) -> Sizing:
    """Return what one rank stores and its limits."""
    settings, drafter, plan = launch.settings, launch.drafter, decide(launch)
    dtype, tp = launch.dtype, settings.sharing
    kv_bytes, draft_kv_bytes = map(dtype_bytes, launch.kv_dtypes)
    kept, replayed = _request_states(launch)
    running, slots = settings.running, slots_per_request(settings)
    states = settings.max_mamba_cache_size and settings.max_mamba_cache_size // settings.groups
    context = settings.context_length or launch.context or drafter.max_position_embeddings
    target_kv, sliding_kv = target_kv_per_token(launch.text, kv_bytes=kv_bytes, tp_size=tp)
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
        block=plan.block,
        slots_per_request=slots,
        context=context,
        max_running=running,
        state_share=settings.mamba_full_memory_ratio or STATE_SHARE,
        max_tokens=settings.max_total_tokens,
        max_states=states or (running if slots == 1 else None),
        page=settings.page,
        window=plan.window,
        in_transfer=in_transfer(settings),
        copies=plan.copies,
        replays=plan.replay,
        indices=_indices(launch, plan) * context,
    )


def _indices(launch: Launch, plan: ServingPlan) -> int:
    """Return the bytes per token of a context that CUDA graphs list once per block position, for all widths together.

    FlashInfer's indices have 32 bits, and a mask of a byte beside them; Triton's have 64 (``init_cuda_graph_state``).
    """
    if launch.device.kind == "cpu":
        return 0
    settings, each = launch.settings, {"flashinfer": 4 + 1, "triton": 8}
    asked = settings.decode_attention_backend or settings.attention_backend
    target = each.get(asked or default_backend(launch.text, launch.device), 0)
    return plan.block * target + plan.drafted * each.get(str(launch.draft_backend), 0) * plan.drafts


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


def dtype_bytes(name: Any) -> float:
    """Return the bytes per element, a fraction for block-scaled K/V; an unknown dtype is a DFlashError."""
    found = DTYPE_BYTES.get(name) if isinstance(name, str) else None
    if found is None:
        raise DFlashError(
            f"the dtype {name} is none of {', '.join(DTYPE_BYTES)}",
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
