"""Expected memory of one rank, from settings, configurations and headers."""

import math
from collections.abc import Iterator

from sglang_dflash.check.machine import GIB, MIB
from sglang_dflash.check.pools import Pools, Sizing, fit
from sglang_dflash.drafter.checkpoint import ModelFiles, TensorHeader
from sglang_dflash.drafter.config import DrafterConfig
from sglang_dflash.drafter.tensors import copied_shapes, expected_shapes
from sglang_dflash.errors import Finding, note, warn
from sglang_dflash.launch.attention import default_backend
from sglang_dflash.launch.division import EVICTED, SLIDING_SHARE, STATE_SHARE, size
from sglang_dflash.launch.launch import Launch
from sglang_dflash.launch.plan import ServingPlan
from sglang_dflash.launch.settings import in_transfer, slots_per_request
from sglang_dflash.launch.sizes import count, dtype_bytes, heads_per_rank, state_bytes, target_kv_per_token
from sglang_dflash.launch.states import CONV_DTYPE, ring_length, state_dtype
from sglang_dflash.launch.which_worker import unproven_kind

MEM_FRACTION = 0.85  # assumed; SGLang computes one from the device and its graphs
_FLOATS = {"F64", "F32", "F16", "BF16"}
_LEAST_LEFT = 1 / 3  # share of SGLang's estimate: published launches leave 0.4 of it or more
# --quantization of plain weights at the start -> bytes per element of linear layers; others are not counted
_ONLINE = {"fp8": 1.0, "mxfp8": 33 / 32, "bitsandbytes": 9 / 16}
_UNQUANTISED = ("embed", "lm_head", "norm", "conv", "router", ".gate.")  # parts of names
_HIGHEST = 0.91  # fraction that is proposed
SMALL_CHUNK = 1024  # prefill chunk on cards that are nearly full of weights


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


def uncounted(launch: Launch) -> Iterator[Finding]:
    scheme = launch.settings.quantization
    if scheme and launch.quantisation is None and scheme not in _ONLINE:
        yield note(f"the size of the weights does not count --quantization {scheme}", about="weights")


def check_fraction(launch: Launch) -> Iterator[Finding]:
    device, highest = launch.device, highest_fraction(launch)
    fraction = launch.settings.mem_fraction_static or 0
    least = (1 - highest) * (1 if device.is_unified else _LEAST_LEFT)
    if device.memory and 1 - fraction < least:
        kind = "unified memory, which the host's programs share" if device.is_unified else "device memory"
        left = size(int(device.memory * (1 - fraction))) or "nothing"
        yield warn(
            f"--mem-fraction-static {fraction} of {kind}: {left} remains for graphs and activations, and SGLang's "
            f"estimate for this card and prefill chunk allows {highest}",
            remedy=f"set --mem-fraction-static {highest}",
            about="memory fraction",
        )


def predict(launch: Launch, plan: ServingPlan) -> Pools:
    """Return the pools of one rank."""
    return fit(sizing_of(launch, plan), int((launch.device.memory or 0) * static_fraction(launch)))


def static_fraction(launch: Launch) -> float:
    return launch.settings.mem_fraction_static or (0.8 if launch.device.is_unified else MEM_FRACTION)


def highest_fraction(launch: Launch) -> float:
    """Return the largest proposed share of device memory for weights and pools.

    With unified memory, servers were killed at 0.85 on a DGX Spark, and none at 0.80 (SGLang's cookbook for
    Qwen3.8-27B). Otherwise graphs and activations of a prefill chunk need what SGLang's ``handle_gpu_memory_settings``
    estimates, and a step float32 logits of full blocks. On RTX 3090, 3.6 GiB outside were too few and 4.7 GB enough. On
    an RTX 5090 0.91 was enough for a chunk of 1,024, and 0.94 was not (the cookbook).
    """
    settings, device, chunk = launch.settings, launch.device, max(prefill_chunk(launch), SMALL_CHUNK)
    if device.is_unified or not device.memory:
        return 0.8 if device.is_unified else _HIGHEST
    reserved = 512 + 1.5 * chunk + 128 * settings.tp_size * settings.pp_size + 2 * settings.running
    logits = 4 * count(launch.text, "vocab_size", 0) * settings.running * launch.block / MIB
    share = 1 - (max(reserved, 10_240 if device.memory >= 60 * GIB else 0) + logits) * MIB / device.memory
    return min(_HIGHEST, max(0.0, math.floor(100 * share) / 100))


def prefill_chunk(launch: Launch) -> int:
    """Return the tokens of a prefill chunk; SGLang's default depends on the device's memory."""
    gib = (launch.device.memory or 0) // GIB
    chunk = next(size for least, size in ((160, 16384), (60, 8192), (20, 4096), (0, 2048)) if gib >= least)
    return launch.settings.chunked_prefill_size or chunk


def sizing_of(launch: Launch, plan: ServingPlan) -> Sizing:
    """Return what one rank stores and its limits."""
    settings, drafter = launch.settings, launch.drafter
    dtype, tp = launch.dtype, settings.sharing
    kv_bytes, draft_kv_bytes = map(dtype_bytes, launch.kv_dtypes)
    state, scratch, records = _request_state(launch, plan)
    running, slots = settings.running, slots_per_request(settings)
    states = settings.max_mamba_cache_size and settings.max_mamba_cache_size // settings.groups
    context = settings.context_length or launch.context or drafter.max_position_embeddings
    target_kv, sliding_kv = target_kv_per_token(launch.text, kv_bytes=kv_bytes, tp_size=tp)
    if settings.disable_hybrid_swa_memory:
        target_kv, sliding_kv = target_kv + sliding_kv, 0
    slides = count(launch.text, "sliding_window") - 1 if sliding_kv else 0
    return Sizing(
        target_weights=_target_weights(launch, dtype),
        drafter_weights=_drafter_weights(launch, dtype, tp),
        target_kv=target_kv,
        sliding_kv=sliding_kv,
        sliding_window=slides,
        sliding_share=settings.swa_full_tokens_ratio or SLIDING_SHARE,
        sliding_cap=_sliding_cap(launch, slides) if sliding_kv else None,
        draft_kv=draft_kv_per_token(drafter, kv_bytes=draft_kv_bytes, tp_size=tp),
        state=state,
        scratch=scratch,
        records=records,
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
        indices=_indices(launch, plan) * context,
    )


def _indices(launch: Launch, plan: ServingPlan) -> int:
    """Return the bytes per token of a context that CUDA graphs list once per block position, for all widths together.

    FlashInfer's indices have 32 bits, and a mask has one byte per index; Triton's have 64 (``init_cuda_graph_state``).
    """
    if launch.device.kind == "cpu":
        return 0
    settings, each = launch.settings, {"flashinfer": 4 + 1, "triton": 8}
    chosen = settings.decode_attention_backend or settings.attention_backend
    target = each.get(chosen or default_backend(launch.text, launch.device), 0)
    return plan.block * target + plan.drafter_width * plan.has_drafter * each.get(str(launch.draft_backend), 0)


def _sliding_cap(launch: Launch, window: int) -> int | None:
    """Without a prefix cache SGLang sizes the pool for all requests (``compute_swa_request_cap``)."""
    settings, block, page = launch.settings, launch.block, launch.settings.page
    if not settings.disable_radix_cache and settings.disaggregation_mode != "decode":
        return None
    chunks = (1 if settings.disable_overlap_schedule else 2) * prefill_chunk(launch)
    waiting = (in_transfer(settings) or 0) * (window + page)
    most = settings.running * (window + (EVICTED + 2) * block + page)
    cap = most + (waiting if settings.disaggregation_mode == "decode" else chunks + page)
    return -(-cap // page) * page


def _request_state(launch: Launch, plan: ServingPlan) -> tuple[int, int, int]:
    """Return the bytes of a request's recurrent state, of its scratch in a verify, and of its replay records."""
    settings, block = launch.settings, launch.block
    conv_dtype = settings.variable(CONV_DTYPE) or ("bfloat16" if launch.device.kind == "gpu" else launch.dtype)
    dtypes = {"recurrent_bytes": dtype_bytes(state_dtype(launch)), "conv_bytes": dtype_bytes(conv_dtype)}
    recurrent, conv, column, record = state_bytes(launch.text, **dtypes, tp_size=settings.sharing)
    if not plan.replay:  # a prefill server verifies nothing
        return recurrent + conv, 0, 0
    records = max(settings.linear_replayssm_cache_len, ring_length(block)) * record
    return recurrent + conv, records + conv + (block - 1) * column, records


def is_weighed(launch: Launch) -> bool:
    settings = launch.settings
    quantised = (settings.quantization and launch.quantisation is None) or "quantization_config" in settings.overrides
    offloaded = settings.cpu_offload_gb > 0 or settings.offload_group_size > 0
    return launch.target_files.tensors is not None and not (quantised or offloaded)


def _target_weights(launch: Launch, dtype: str) -> int:
    # all ranks divide MLPs; the ranks of a group divide the rest
    settings, whole = launch.settings, _all_bytes(launch, dtype)
    mlp = _mlp_bytes(launch, dtype) if settings.groups > 1 else whole
    return mlp // settings.tp_size + (whole - mlp) // settings.sharing


def _all_bytes(launch: Launch, dtype: str, part: str = "") -> int:
    headers, plain, online = launch.target_files.tensors, dtype_bytes(dtype), _online_bytes(launch)
    if headers is None:
        stated = _stated_size(launch.target_files)
        tables = min(stated, int(2 * count(launch.text, "vocab_size", 0) * count(launch.text, "hidden_size") * plain))
        return stated if online is None else int(tables + (stated - tables) * online / plain)
    is_plain = launch.quantisation is None

    def held(name: str, header: TensorHeader) -> float:  # plain floats in ``dtype``, everything else as stored
        if not is_plain or header.dtype not in _FLOATS:
            return header.num_bytes
        is_linear = online and len(header.shape) > 1 and not any(other in name for other in _UNQUANTISED)
        return header.numel * (online if online and is_linear else plain)

    return int(sum(held(*each) for each in headers.items() if part in each[0] and not each[0].startswith("mtp.")))


def _online_bytes(launch: Launch) -> float | None:
    """Return the bytes per element of layers that SGLang quantises at the start, or None."""
    return _ONLINE.get(launch.settings.quantization) if launch.quantisation is None else None


def _mlp_bytes(launch: Launch, dtype: str) -> int:
    if launch.target_files.tensors is not None:
        return _all_bytes(launch, dtype, ".mlp.")
    if launch.quantisation is not None:
        return 0  # unknown
    text = launch.text
    experts = count(text, "num_experts", 0) * count(text, "moe_intermediate_size", 0)
    width = experts or count(text, "intermediate_size", 0)
    numbers = 3 * count(text, "num_hidden_layers") * count(text, "hidden_size") * width
    return min(int(numbers * (_online_bytes(launch) or dtype_bytes(dtype))), _all_bytes(launch, dtype))


def _stated_size(files: ModelFiles) -> int:
    metadata = (files.index or {}).get("metadata")
    size = metadata.get("total_size") if isinstance(metadata, dict) else None
    return size if isinstance(size, int) else 0


def _drafter_weights(launch: Launch, dtype: str, tp_size: int) -> int:
    drafter, headers = launch.drafter, launch.drafter_files.tensors or {}
    sizes = {name: int(math.prod(shape) * dtype_bytes(dtype)) for name, shape in expected_shapes(drafter).items()}
    if drafter.quantization and headers:
        stored = {name.removeprefix("model."): each.num_bytes for name, each in headers.items()}
        sizes = {name: size for name, size in stored.items() if name not in copied_shapes(drafter)}
    return sum(size // sharing_ranks(name, drafter, tp_size) for name, size in sizes.items())


def draft_kv_per_token(drafter: DrafterConfig, *, kv_bytes: float, tp_size: int) -> int:
    return int(2 * drafter.num_layers * heads_per_rank(drafter.num_kv_heads, tp_size) * drafter.head_dim * kv_bytes)


def sharing_ranks(name: str, config: DrafterConfig, tp_size: int) -> int:
    """Return the number of tensor-parallel ranks that divide a checkpoint tensor."""
    module, _, kind = name.rpartition(".")
    layer = module.rpartition(".")[2]
    if layer in ("k_proj", "v_proj"):
        return min(tp_size, config.num_kv_heads)
    is_divided = layer in ("q_proj", "gate_proj", "up_proj", "down_proj") or (layer == "o_proj" and kind != "bias")
    return tp_size if is_divided else 1
