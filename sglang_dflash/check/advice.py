"""Flags that let more requests run or more contexts stay cached."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from sglang_dflash.check.memory import MemoryTable, divide, sizing_of
from sglang_dflash.check.pools import Pools, Sizing, best_ratio, index_of_most_requests
from sglang_dflash.plan.device import Device
from sglang_dflash.plan.division import TOKENS_PER_REQUEST
from sglang_dflash.plan.pair import Pair
from sglang_dflash.plan.settings import SLOTS, WINDOW_FLAG, Settings

WINDOW = 2048  # tokens
_CLEAR_GAIN = 1.1  # times as many requests
_MAX_TRIES = 64
Change = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Advice:
    flag: str
    running: int
    tokens: int
    prefixes: int


@dataclass(frozen=True)
class Load:
    """A load to serve. ``conversations`` are contexts to keep cached, including running requests."""

    users: int
    context: int  # tokens per request, prompt plus answer
    conversations: int

    def share(self, groups: int) -> Load:
        return replace(self, users=-(-self.users // groups), conversations=-(-self.conversations // groups))

    def contexts_in(self, pools: Pools) -> int:
        by_kv = pools.tokens // self.context
        if not pools.state.slot or pools.sizing.slots_per_request == 1:
            return by_kv
        return min(by_kv, pools.prefixes() + pools.running)

    def fits(self, pools: Pools) -> bool:
        return pools.running >= self.users and pools.tokens >= max(self.users, self.conversations) * self.context


@dataclass(frozen=True)
class Proposal:
    flags: tuple[str, ...]
    pools: Pools
    contexts: int

    def __str__(self) -> str:
        return f"{' '.join(self.flags)} ({self.pools.tokens} tokens of K/V, {self.contexts} contexts kept)"


class Adviser:
    def __init__(self, settings: Settings, machine: Device, pair: Pair, table: MemoryTable) -> None:
        self._settings, self._machine, self._pair, self._table = settings, machine, pair, table
        self._highest_fraction = max(table.fraction, table.highest)
        self._groups = settings.groups

    def more_requests(self) -> list[Advice]:
        """Return the mildest value of each flag that lets all requests run, or else the most."""
        before, table = self._table.served, self._table
        wanted = before.sizing.max_running
        # the launch may have raised it
        ratio = best_ratio(self._sizing(self._settings), table.static_bytes, replay=before.replay)
        percents = range(round(table.fraction * 100) + 1, round(self._highest_fraction * 100) + 1)
        fewer = range(wanted - 1, before.running, -1 - (wanted - before.running) // _MAX_TRIES)
        flags: list[list[Change]] = [
            [_change("--mem-fraction-static", mem_fraction_static=percent / 100) for percent in percents],
            [_change("--mamba-full-memory-ratio", mamba_full_memory_ratio=ratio)],
            [_change("--max-running-requests", max_running_requests=running * self._groups) for running in fewer],
            self._lifted(before),
            *([each] for each in self._mild_changes()),
        ]
        found = [self._best(changes) for changes in flags if changes]
        return [each for each in found if self._lets_more_run(each)]

    def propose(self, load: Load) -> Proposal | None:
        """Return the least harmful flags that serve the load, or None."""
        chosen: list[Change] = []
        pools = self._loaded(load, chosen)
        for change in [*self._by_harm(load)] * 2:
            if load.fits(pools):
                break
            if change not in chosen and (after := self._loaded(load, [*chosen, change])).tokens >= pools.tokens:
                chosen.append(change)
                pools = after
        if not load.fits(pools):
            return None
        for change in reversed(chosen):
            fewer = [each for each in chosen if each is not change]
            if load.fits(self._loaded(load, fewer)):
                chosen = fewer
        pools = self._loaded(load, chosen, fill=True)
        slots = pools.state_slots if pools.sizing.slots_per_request > 1 else 0
        own = (f"--max-running-requests {load.users}", *([f"--max-mamba-cache-size {slots}"] if slots else []))
        return Proposal((*own, *(flag for flag, _ in chosen)), pools, load.contexts_in(pools))

    def largest(self, load: Load) -> Proposal | None:
        """Return the proposal for most users, then for most contexts."""

        def most(of: Callable[[int], Load], wanted: int) -> int:
            return bisect_left(range(1, wanted + 1), True, key=lambda each: self.propose(of(each)) is None)

        def of_users(users: int) -> Load:
            return replace(load, users=users, conversations=0)

        users = most(of_users, load.users)
        if users < load.users:
            return self.propose(of_users(users)) if users else None
        contexts = most(lambda each: replace(load, conversations=each), load.conversations)
        return self.propose(replace(load, conversations=contexts))

    def _lifted(self, before: Pools) -> list[Change]:
        sizing, changes = before.sizing, list[Change]()
        if self._settings.max_mamba_cache_size:
            needed = sizing.max_running * sizing.slots_per_request
            changes.append(_change("--max-mamba-cache-size", max_mamba_cache_size=needed))
        elif self._settings.max_total_tokens:
            needed = sizing.max_running * min(TOKENS_PER_REQUEST, sizing.context)
            changes.append(_change("--max-total-tokens", max_total_tokens=needed))
        return changes

    def _mild_changes(self) -> Iterator[Change]:
        """Yield changes in order of harm."""
        settings, sizing, hybrid = self._settings, self._table.served.sizing, self._table.served.state.slot > 0
        if hybrid and not settings.disable_overlap_schedule and sizing.slots_per_request == SLOTS["extra_buffer"]:
            yield _change("--mamba-radix-cache-strategy", mamba_radix_cache_strategy="extra_buffer_lazy")
        if sizing.ring is None:
            yield _change(WINDOW_FLAG, speculative_draft_window_size=WINDOW)
        if hybrid and settings.mamba_ssm_dtype is None:
            yield _change("--mamba-ssm-dtype", mamba_ssm_dtype="bfloat16")
        if sizing.block >= 8:  # narrower blocks gain next to nothing
            yield _change("--speculative-num-draft-tokens", speculative_num_draft_tokens=sizing.block // 2)

    def _by_harm(self, load: Load) -> Iterator[Change]:
        """In order of harm. A draft window ends a hybrid target's hits early, at an older state."""
        hybrid = self._table.served.state.slot > 0
        if self._highest_fraction > self._table.fraction:
            yield _change("--mem-fraction-static", mem_fraction_static=self._highest_fraction)
        for flag, changes in self._mild_changes():
            if not (load.conversations and hybrid and flag.startswith(WINDOW_FLAG)):
                yield flag, changes

    def _loaded(self, load: Load, chosen: list[Change], *, fill: bool = False) -> Pools:
        changes = {name: value for _, each in chosen for name, value in each.items()}
        changes["max_running_requests"] = load.users * self._groups
        sizing = self._sizing(self._settings.changed(**changes))
        slots = sizing.slots_per_request
        if not sizing.kept.slot or slots == 1:
            return self._pools(changes)
        outer = load.users * (slots - 2)  # without their own prefixes
        least = max(load.users * slots, outer + load.conversations)
        pools = self._pools({**changes, "max_mamba_cache_size": least * self._groups})
        if not fill:
            return pools
        # an additional state is useful only while K/V also hold its context
        more = (pools.tokens - load.context * (least - outer)) // (load.context + pools.state_price)
        if more <= 0:
            return pools
        return self._pools({**changes, "max_mamba_cache_size": (least + more) * self._groups})

    def _pools(self, changes: dict[str, Any]) -> Pools:
        settings = self._settings.changed(**changes)
        static = (self._machine.memory or 0) * (settings.mem_fraction_static or self._table.fraction)
        return divide(settings, self._sizing(settings), static)[0]

    def _sizing(self, settings: Settings) -> Sizing:
        return sizing_of(settings, self._machine, self._pair, copies=False)  # a history is not static memory

    def _best(self, values: list[Change]) -> Advice:
        fits = [self._pools(changes) for _, changes in values]
        index = index_of_most_requests(fits)
        return Advice(values[index][0], fits[index].running, fits[index].tokens, fits[index].prefixes())

    def _lets_more_run(self, advice: Advice) -> bool:
        before = self._table.served
        if advice.flag.startswith(WINDOW_FLAG) and before.capped_by in ("tokens of K/V", "--max-running-requests"):
            return advice.running >= before.running and advice.tokens > before.tokens
        wanted = before.sizing.max_running
        return before.running < wanted and advice.running >= min(wanted, _CLEAR_GAIN * before.running + 1)


def _change(flag: str, **settings: Any) -> Change:
    [value] = settings.values()
    return f"{flag} {value}", settings
