"""Expected memory of one rank: from settings, configurations and headers to the division of a device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from sglang_dflash.drafter.checkpoint import TensorHeader
from sglang_dflash.drafter.config import quantization, text_config
from sglang_dflash.drafter.tensors import copied_shapes, expected_shapes, sharing_ranks
from sglang_dflash.errors import Doubt
from sglang_dflash.plan.machine import Machine
from sglang_dflash.plan.pair import Pair
from sglang_dflash.plan.pools import (
    Demand,
    Graphs,
    Outside,
    Pools,
    Reader,
    buffers,
    default_backend,
    fit,
    sampling,
    share,
)
from sglang_dflash.plan.serving import DraftWindow, context_window
from sglang_dflash.plan.settings import Settings, ring_length
from sglang_dflash.plan.sizes import (
    DTYPE_BYTES,
    FAMILIES,
    count,
    draft_kv_per_token,
    dtype_bytes,
    head_size,
    is_known,
    state_bytes,
    target_kv_per_token,
    target_parameters,
)

MEM_FRACTION = 0.85  # assumed; SGLang computes one from the device and its graphs
STATE_SHARE = 0.9  # SGLang's --mamba-full-memory-ratio
_RATIO_UNSET = (None, STATE_SHARE)  # the default is indistinguishable from a user's own 0.9
_FLOATS = {"F64", "F32", "F16", "BF16"}


@dataclass(frozen=True)
class MemoryTable:
    """The pair's demand and the division of a device's static memory.

    Attributes:
        device: its name.
        static_bytes: 0 if the device's memory is unknown.
        fraction: of the device's memory, static.
        demand: what is divided, and how.
        ways: the division as served; then, for a hybrid target, with states the other way.
        outside: memory outside the static fraction; None if the device's memory is unknown, or on a CPU.
    """

    device: str
    static_bytes: int
    fraction: float
    demand: Demand
    ways: list[Pools]
    outside: Outside | None = None


def expected_memory(
    settings: Settings, machine: Machine, pair: Pair, widths: tuple[int, ...], *, copies: bool
) -> MemoryTable:
    """Divide the machine's memory as SGLang will.

    Args:
        widths: of a step's block.
        copies: whether blocks are copied.

    Raises:
        Doubt: no sizes are known for the target's family.
        DFlashError: a size in a configuration is unusable.
    """
    if not is_known(pair.target):
        raise Doubt(
            f"no sizes are known for targets of model_type {text_config(pair.target).get('model_type')!r}",
            expected=f"one of {', '.join(sorted(FAMILIES))}",
            remedy="none needed: SGLang divides the memory when it starts",
        )
    needed = demand(settings, machine, pair, copies=copies)
    memory, fraction = machine.memory or 0, settings.mem_fraction_static or MEM_FRACTION
    static = int(memory * fraction)
    if not memory:
        ways = divide(settings, machine, needed, static)
        return MemoryTable(f"{machine.name}: sizes only", static, fraction, needed, ways)
    needed, ways = divide_as_served(settings, machine, needed, static)
    room = memory - static - ways[0].bytes["history"]
    outer = outside(settings, machine, pair, needed, widths, room) if machine.kind == "gpu" else None
    return MemoryTable(machine.name, static, fraction, needed, ways, outer)


def divide_as_served(settings: Settings, machine: Machine, needed: Demand, static: float) -> tuple[Demand, list[Pools]]:
    """The division, and the demand with the ratio that a server uses for it.

    A server that replays states gets the lowest ``--mamba-full-memory-ratio`` that lets all requests run and leaves
    K/V for a whole context (:func:`~sglang_dflash.plan.pools.share`), unless the user chose one.
    """
    ways = divide(settings, machine, needed, static)
    if ways[0].replay and settings.mamba_full_memory_ratio in _RATIO_UNSET:
        needed = replace(needed, state_share=share(needed, static, replay=True))
        ways[0] = fit(needed, static, replay=True)
    return needed, ways


def divide(settings: Settings, machine: Machine, needed: Demand, static: float) -> list[Pools]:
    """The division as served; then, where a hybrid target's blocks are verified, with states the other way."""
    kept = fit(needed, static)
    if not needed.state.slot or not needed.verifies:
        return [kept]
    replayed = fit(needed, static, replay=True)
    lets_more_run = kept.running < replayed.running
    replay = is_replayed(settings, machine, settings.replay_choice, lets_more_run=lets_more_run)
    return [replayed, kept] if replay else [kept, replayed]


def is_replayed(settings: Settings, machine: Machine, choice: bool | None, *, lets_more_run: bool) -> bool:
    """Whether a hybrid target's states are replayed.

    Replay is unmeasured on GPUs: it is used there only if more of the requested requests then fit.

    Args:
        choice: the user's (:attr:`Settings.replay_choice`).
        lets_more_run: whether more of the requested requests can run with a replay, as far as memory is known.
    """
    if choice is not None or settings.replay_obstacle:
        return bool(choice)
    return machine.kind == "cpu" or lets_more_run


def demand(settings: Settings, machine: Machine, pair: Pair, *, copies: bool = False) -> Demand:
    """Compute the memory demand of one rank.

    Args:
        copies: whether blocks are copied.

    Raises:
        DFlashError: a size or dtype in a configuration is unusable.
    """
    drafter, text = pair.drafter, text_config(pair.target)
    dtype, tp, page, block = pair.served_dtype(settings), settings.tp_size, settings.page, pair.block_size(settings)
    kv_bytes, draft_kv_bytes = (
        DTYPE_BYTES.get(str(name), dtype_bytes(dtype))
        for name in (settings.kv_cache_dtype, settings.speculative_draft_kv_cache_dtype or settings.kv_cache_dtype)
    )
    kept, replayed = _state_dtypes(settings, machine, text)
    conv = settings.conv_dtype_variable or ("bfloat16" if machine.kind == "gpu" else dtype)
    states = partial(state_bytes, text, conv_bytes=dtype_bytes(conv), tp_size=tp)
    running, slots = settings.running, settings.slots_per_request
    window, context = context_window(settings.speculative_draft_window_size, drafter), longest(settings, pair)
    # SGLang leaves the verify scratch of a prefill server out, except for these (_pd_prefill_skips_mamba_spec_state).
    keeps_scratch = settings.enable_pd_role_switch or settings.enable_unified_memory
    return Demand(
        target_weights=_target_weights(pair, dtype) // tp,
        drafter_weights=_drafter_weights(pair, dtype, tp),
        target_kv=target_kv_per_token(text, kv_bytes=kv_bytes, tp_size=tp),
        draft_kv=draft_kv_per_token(drafter, kv_bytes=draft_kv_bytes, tp_size=tp),
        state=states(recurrent_bytes=dtype_bytes(kept)),
        block=block,
        slots_per_request=slots,
        context=context,
        state_share=settings.mamba_full_memory_ratio or STATE_SHARE,
        max_running=running,
        max_tokens=settings.max_total_tokens,
        max_states=settings.max_mamba_cache_size or (running if slots == 1 else None),
        page=page,
        ring=None if window is None else DraftWindow(window, block, page).ring_slots(context),
        replayed=states(recurrent_bytes=dtype_bytes(replayed)),
        in_transfer=settings.in_transfer,
        records=max(settings.linear_replayssm_cache_len, ring_length(block)),
        copies=copies,
        weighed=_is_weighed(settings, pair),
        verifies=settings.disaggregation_mode != "prefill" or keeps_scratch,
    )


def longest(settings: Settings, pair: Pair) -> int:
    """Tokens of the longest request."""
    own = pair.drafter.max_position_embeddings
    return settings.context_length or count(text_config(pair.target), "max_position_embeddings", own)


def _state_dtypes(settings: Settings, machine: Machine, text: Mapping[str, Any]) -> tuple[str, str]:
    """Dtypes of a state that is kept, and of one that is replayed: float32 unless a flag sets another."""
    asked = settings.mamba_ssm_dtype or ("bfloat16" if settings.needs_bfloat16_states(machine) else None)
    kept = asked or settings.ssm_dtype_variable or text.get("mamba_ssm_dtype") or "float32"
    return kept, asked or "float32"


def _is_weighed(settings: Settings, pair: Pair) -> bool:
    """Whether the headers are read, and no argument makes the weights smaller than they describe."""
    quantised = settings.quantization and quantization(pair.target) is None
    offloaded = settings.cpu_offload_gb > 0 or settings.offload_group_size > 0
    return pair.target_files.tensors is not None and not (quantised or offloaded or pair.overrides)


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


def outside(
    settings: Settings, machine: Machine, pair: Pair, demand: Demand, widths: tuple[int, ...], room: int
) -> Outside:
    """Memory of one rank outside the static fraction, of ``room`` bytes."""
    text, drafter, tp = text_config(pair.target), pair.drafter, settings.tp_size
    general = settings.attention_backend or default_backend(machine.capability and machine.capability[0])
    target_backend = settings.prefill_attention_backend or general
    draft_backend = settings.speculative_draft_attention_backend or target_backend
    readers = (
        Reader(target_backend, count(text, "num_attention_heads") // tp, head_size(text)),
        Reader(
            draft_backend,
            drafter.num_heads // tp,
            drafter.head_dim,
            drafter.sliding_window,
            drafter.block_size or demand.block,
        ),
    )
    captured = not settings.disable_decode_cuda_graph and settings.cuda_graph_backend_decode != "disabled"
    batch = min(demand.max_running, settings.cuda_graph_max_bs_decode or demand.max_running)
    taken = buffers(Graphs(batch, widths, demand.context, demand.page), *readers) if captured else 0
    peak = sampling(demand.max_running * demand.block, count(text, "vocab_size", drafter.vocab_size))
    return Outside(peak, taken, len(widths), room - peak - taken)
