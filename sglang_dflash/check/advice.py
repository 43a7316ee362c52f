"""Flags that let more requests run, or one where none fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from sglang_dflash.check.memory import SMALL_CHUNK, highest_fraction, predict, prefill_chunk, static_fraction
from sglang_dflash.check.pools import Pools
from sglang_dflash.launch.division import STATE_SHARE, TOKENS_PER_REQUEST
from sglang_dflash.launch.launch import Launch
from sglang_dflash.launch.plan import decide
from sglang_dflash.launch.settings import SLOTS, flag_of

WINDOW = 2048  # tokens
_CLEAR_GAIN = 1.1  # times as many requests
_MAX_TRIES = 64
_FEW = 16  # requests on a card that is nearly full of weights
_HAS_FP8 = (8, 9)  # compute capability
_RATIO, _MAX_RATIO = "mamba_full_memory_ratio", 10
_PRICES = {
    "mamba_ssm_dtype": "rounds the target's states",
    "speculative_num_draft_tokens": "shorter drafts",
    "speculative_draft_window_size": "the drafter reads this many tokens",
    "mamba_radix_cache_strategy": "fewer snapshots",
    "kv_cache_dtype": "rounds K/V",
}


@dataclass(frozen=True)
class Advice:
    flag: str
    running: int
    tokens: int
    prefixes: int
    price: str
    gpus: int = 1

    @classmethod
    def of(cls, flag: str, pools: Pools, price: str, gpus: int = 1) -> Advice:
        return cls(flag, pools.running, pools.tokens, pools.prefixes, price, gpus)


def more_requests(launch: Launch, served: Pools) -> list[Advice]:
    """Return the mildest value of each flag that lets all requests run, or else as many as possible.

    If no request fits, also the flags of a card that is nearly full of weights, and the number of GPUs that is enough.
    """
    advice = list[Advice]()
    wanted = served.sizing.max_running
    if served.running >= wanted:
        return advice
    for name, values in _changes(launch, served):
        tried = [_pools(launch.changed(**{name: value})) for value in values]
        if name == _RATIO:  # K/V for one full context must remain
            tried = [*takewhile(lambda pools: pools.tokens >= min(pools.sizing.context, served.tokens), tried)]
        running = [pools.requests_of(TOKENS_PER_REQUEST) for pools in tried]
        index = running.index(max(running))
        if (best := tried[index]).running >= min(wanted, _CLEAR_GAIN * served.running + 1):
            flag = f"{flag_of(name)} {values[index]}"
            advice.append(Advice.of(flag, best, _PRICES.get(name, "")))
    if not served.running:
        advice += [*_together(launch, served), *_on_more_gpus(launch, served)]
    return advice


def _together(launch: Launch, served: Pools) -> Iterator[Advice]:
    """Yield the flags of SGLang's cookbook for Qwen3.8-27B on an RTX 5090, with others until a long answer fits."""
    changes: dict[str, Any] = {"chunked_prefill_size": min(SMALL_CHUNK, prefill_chunk(launch))}
    tried = list[tuple[dict[str, Any], Pools]]()
    for added in _rounding(launch, served):
        changes |= added
        tried += [_most(changes, launch, served)]
        if tried[-1][1].requests_of(TOKENS_PER_REQUEST):
            break
    best, pools = max(tried, key=lambda each: each[1].tokens)
    if pools.running:
        flags = " ".join(f"{flag_of(name)} {value}" for name, value in best.items())
        prices = [price for name in best if (price := _PRICES.get(name))]
        yield Advice.of(flags, pools, ", ".join(["short chunks", *prices]))


def _rounding(launch: Launch, served: Pools) -> Iterator[dict[str, Any]]:
    is_hybrid = served.sizing.state > 0
    yield {"mamba_ssm_dtype": "bfloat16"} if is_hybrid and launch.settings.mamba_ssm_dtype is None else {}
    if is_hybrid and served.sizing.slots_per_request == SLOTS["extra_buffer"]:
        yield {"mamba_radix_cache_strategy": "extra_buffer_lazy"}
    if launch.settings.kv_cache_dtype == "auto" and (launch.device.capability or (0, 0)) >= _HAS_FP8:
        yield {"kv_cache_dtype": "fp8_e4m3"}


def _most(changes: dict[str, Any], launch: Launch, served: Pools) -> tuple[dict[str, Any], Pools]:
    """Return the number of requests with which most long answers fit, and the fraction of memory for it."""
    tried = list[tuple[dict[str, Any], Pools]]()
    for running in range(1, min(_FEW, served.sizing.max_running) + 1):
        most = {"max_running_requests": running * launch.settings.groups}
        highest = highest_fraction(launch.changed(**changes, **most))
        flags = {"mem_fraction_static": max(highest, static_fraction(launch)), **changes, **most}
        tried.append((flags, _pools(launch.changed(**flags))))
    return max(tried, key=lambda each: each[1].requests_of(TOKENS_PER_REQUEST))


def _on_more_gpus(launch: Launch, served: Pools) -> Iterator[Advice]:
    for gpus in (2, 4, 8):
        if gpus > launch.settings.tp_size:
            pools = _pools(launch.changed(tp_size=gpus))
            if pools.running:
                yield Advice.of(f"--tp-size {gpus}", pools, f"{gpus} GPUs", gpus)
                return


def _changes(launch: Launch, served: Pools) -> Iterator[tuple[str, Sequence[Any]]]:
    """Yield fields of the settings, each with values in order of harm."""
    settings, sizing = launch.settings, served.sizing
    hybrid, wanted = sizing.state > 0, sizing.max_running
    percents = range(round(static_fraction(launch) * 100) + 1, round(highest_fraction(launch) * 100) + 1)
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


def _pools(launch: Launch) -> Pools:
    return predict(launch, decide(launch))
