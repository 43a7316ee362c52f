"""Flags that let more requests run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from sglang_dflash.check.memory import MemoryTable, divide, sizing_of
from sglang_dflash.check.pools import Pools
from sglang_dflash.plan.device import Device
from sglang_dflash.plan.division import STATE_SHARE, TOKENS_PER_REQUEST
from sglang_dflash.plan.pair import Pair
from sglang_dflash.plan.settings import SLOTS, Settings, flag_of

WINDOW = 2048  # tokens
_CLEAR_GAIN = 1.1  # times as many requests
_MAX_TRIES = 64
_RATIO, _MAX_RATIO = "mamba_full_memory_ratio", 10
_PRICES = {
    "mamba_ssm_dtype": "rounds the target's states",
    "speculative_num_draft_tokens": "shorter drafts",
    "speculative_draft_window_size": "the drafter reads this many tokens",
    "mamba_radix_cache_strategy": "fewer snapshots",
}


@dataclass(frozen=True)
class Advice:
    flag: str
    running: int
    tokens: int
    prefixes: int
    price: str


def more_requests(settings: Settings, device: Device, pair: Pair, memory: MemoryTable) -> list[Advice]:
    """Return the mildest value of each flag that lets all requests run, or else the most."""
    served, advice = memory.served, list[Advice]()
    wanted = served.sizing.max_running
    if served.running >= wanted:
        return advice
    for name, values in _changes(settings, memory):
        tried = [_pools(settings.changed(**{name: value}), device, pair, memory) for value in values]
        if name == _RATIO:  # K/V for one full context must remain
            tried = [*takewhile(lambda pools: pools.tokens >= min(pools.sizing.context, served.tokens), tried)]
        running = [pools.requests_of(TOKENS_PER_REQUEST) for pools in tried]
        index = running.index(max(running))
        if (best := tried[index]).running >= min(wanted, _CLEAR_GAIN * served.running + 1):
            flag = f"{flag_of(name)} {values[index]}"
            advice.append(Advice(flag, best.running, best.tokens, best.prefixes, _PRICES.get(name, "")))
    return advice


def _changes(settings: Settings, memory: MemoryTable) -> Iterator[tuple[str, Sequence[Any]]]:
    """Yield fields of the settings, each with values in order of harm."""
    served, sizing = memory.served, memory.served.sizing
    hybrid, wanted = served.state.slot > 0, sizing.max_running
    percents = range(round(memory.fraction * 100) + 1, round(memory.highest * 100) + 1)
    if percents:
        yield "mem_fraction_static", [percent / 100 for percent in percents]
    ratio = settings.mamba_full_memory_ratio or STATE_SHARE
    yield _RATIO, [ratio, *(each / 10 for each in range(int(ratio * 10) + 1, _MAX_RATIO * 10 + 1))]
    if fewer := range(wanted - 1, served.running, -1 - (wanted - served.running) // _MAX_TRIES):
        yield "max_running_requests", [running * settings.groups for running in fewer]
    if settings.max_mamba_cache_size:
        yield "max_mamba_cache_size", [wanted * sizing.slots_per_request * settings.groups]
    elif settings.max_total_tokens:
        yield "max_total_tokens", [wanted * min(TOKENS_PER_REQUEST, sizing.context)]
    if hybrid and not settings.disable_overlap_schedule and sizing.slots_per_request == SLOTS["extra_buffer"]:
        yield "mamba_radix_cache_strategy", ["extra_buffer_lazy"]
    if sizing.window is None:
        yield "speculative_draft_window_size", [WINDOW]
    if hybrid and settings.mamba_ssm_dtype is None:
        yield "mamba_ssm_dtype", ["bfloat16"]
    if sizing.block >= 8:  # narrower blocks gain next to nothing
        yield "speculative_num_draft_tokens", [sizing.block // 2]


def _pools(settings: Settings, device: Device, pair: Pair, memory: MemoryTable) -> Pools:
    static = int((device.memory or 0) * (settings.mem_fraction_static or memory.fraction))
    return divide(settings, sizing_of(settings, device, pair), static)[0]
