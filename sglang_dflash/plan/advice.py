"""Flags that would let more requests run or more contexts stay cached, for ``sglang-dflash check`` alone."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from sglang_dflash.plan.machine import Machine
from sglang_dflash.plan.memory import MemoryTable, demand, divide, divide_as_served
from sglang_dflash.plan.pair import Pair
from sglang_dflash.plan.pools import FLOOR, Demand, Outside, Pools, best, share
from sglang_dflash.plan.settings import REPLAY_FLAG, SLOTS, WINDOW_FLAG, Settings

WINDOW = 2048  # draft window, tokens
HIGHEST_FRACTION = 0.9  # of the device; activations and graphs take the rest
_CLEAR_GAIN = 1.1  # times as many requests or prefixes
_HIGHEST_RATIO = 10
_MOST_TRIES = 64  # values of one flag
# A flag with a value, and the demand and static bytes that it leads to.
_Try = tuple[str, Demand, float]


@dataclass(frozen=True)
class Advice:
    """A flag, and the requests, tokens of K/V and additional prefixes that fit with it."""

    flag: str
    running: int
    tokens: int
    prefixes: int = 0

    def __str__(self) -> str:
        return f"{self.flag} ({self.running} requests, {self.tokens} tokens of K/V)"


@dataclass(frozen=True)
class Mix:
    """A load that a server is to hold at once.

    Attributes:
        users: requests that run at once.
        context: tokens per request, prompt and answer.
        conversations: contexts to keep in the prefix cache, including those of the running requests.
    """

    users: int
    context: int
    conversations: int

    def held_by(self, pools: Pools) -> int:
        """Contexts that the pools keep: each takes its tokens of K/V, and of a hybrid target a recurrent state."""
        by_kv = pools.tokens // self.context
        if not pools.state or pools.slots_per_request == 1:
            return by_kv
        return min(by_kv, pools.prefixes() + pools.running)

    def served_by(self, pools: Pools) -> bool:
        contexts = max(self.users, self.conversations)
        return pools.running >= self.users and pools.tokens >= contexts * self.context


@dataclass(frozen=True)
class Split:
    """Flags, the pools that they divide the memory into, and the contexts that these keep."""

    flags: tuple[str, ...]
    pools: Pools
    conversations: int

    def __str__(self) -> str:
        kept = f"{self.pools.tokens} tokens of K/V, {self.conversations} contexts kept"
        return f"{' '.join(self.flags)} ({kept})"


def highest_fraction(fraction: float, outside: Outside | None, memory: int) -> float:
    """Return the largest static fraction that leaves room for sampling, graphs and activations, in hundredths."""
    room = outside.left - FLOOR if outside else memory
    return max(fraction, min(HIGHEST_FRACTION, int(100 * (fraction + room / memory)) / 100))


def fractions(fraction: float, highest: float) -> Iterator[tuple[str, float]]:
    """Each larger static fraction as a flag, with its value."""
    for percent in range(round(fraction * 100) + 1, round(highest * 100) + 1):
        yield f"--mem-fraction-static {percent / 100}", percent / 100


def single_values(settings: Settings, now: Demand) -> Iterator[tuple[str, dict[str, Any]]]:
    """A flag and the settings that it changes, the least harmful first: a narrower block costs speed."""
    if now.state.slot and not settings.disable_overlap_schedule and now.slots_per_request == SLOTS["extra_buffer"]:
        lazy = "extra_buffer_lazy"
        yield f"--mamba-radix-cache-strategy {lazy}", {"mamba_radix_cache_strategy": lazy}
    if now.ring is None:
        yield f"{WINDOW_FLAG} {WINDOW}", {"speculative_draft_window_size": WINDOW}
    if now.state.slot and settings.mamba_ssm_dtype is None:
        yield "--mamba-ssm-dtype bfloat16", {"mamba_ssm_dtype": "bfloat16"}
    half = now.block // 2
    if half >= 4:  # narrower blocks gain next to nothing
        yield f"--speculative-num-draft-tokens {half}", {"speculative_num_draft_tokens": half}


class Adviser:
    """Advice for one pair on one machine, whose memory is known."""

    def __init__(self, settings: Settings, machine: Machine, pair: Pair, table: MemoryTable) -> None:
        self._settings, self._machine, self._pair, self._table = settings, machine, pair, table
        self._memory = machine.memory or 0

    def more_requests(self) -> list[Advice]:
        """Return the mildest value of each flag that lets all requests run, or else the most."""
        now, static, before = self._demand(), self._memory * self._table.fraction, self._table.ways[0]
        ratio = share(now, static, replay=before.replay)
        flags: list[list[_Try]] = [
            [(flag, now, self._memory * value) for flag, value in fractions(self._table.fraction, self._highest())],
            [(f"--mamba-full-memory-ratio {ratio}", replace(now, state_share=ratio), static)],
            [
                (f"--max-running-requests {running}", replace(now, max_running=running), static)
                # A replay sets scratch aside for every request: fewer requests leave more for their states.
                for running in range(
                    now.max_running - 1, before.running, -1 - (now.max_running - before.running) // _MOST_TRIES
                )
            ],
            *([(flag, self._demand(**changes), static)] for flag, changes in single_values(self._settings, now)),
        ]
        found = [self._best(tries) for tries in flags if tries]
        return [each for each in found if _gains(each, before, now.max_running)]

    def more_prefixes(self) -> list[Advice]:
        """Return flags that keep more prefixes of a hybrid target, twice as many or one per request.

        A draft window keeps no more of them, but frees K/V for them.
        """
        before, now = self._table.ways[0], replace(self._demand(), state_share=self._table.demand.state_share)
        kept = before.prefixes()
        if not now.state.slot or now.slots_per_request == 1:
            return []
        wanted = kept + max(kept, before.running)
        shared = {"mamba_full_memory_ratio": now.state_share}
        slots = before.state_slots + wanted - kept
        tries = [self._tried(f"--max-mamba-cache-size {slots}", replace(now, max_states=slots))]
        tries += [
            self._tried(flag, self._demand(**shared, **changes)) for flag, changes in single_values(self._settings, now)
        ]
        if now.max_states is None:
            ratios = (each / 10 for each in range(int(now.state_share * 10) + 1, _HIGHEST_RATIO * 10 + 1))
            raised = (
                self._tried(f"--mamba-full-memory-ratio {each}", replace(now, state_share=each)) for each in ratios
            )
            tries += list(islice((each for each in raised if each[1].prefixes() >= wanted), 1))
        found = []
        for flag, after in tries:
            gains = after.prefixes() > _CLEAR_GAIN * kept or flag.startswith(WINDOW_FLAG)
            if after.running >= before.running and gains:
                found.append(Advice(flag, after.running, after.tokens, after.prefixes()))
        return found

    def split(self, mix: Mix) -> Split | None:
        """Return flags that serve the mix, the least harmful ones and no superfluous one; None if none do.

        Flags are added in order of harm while they leave more K/V, then those that are not needed are left out.
        """
        chosen: list[tuple[str, dict[str, Any]]] = []
        pools = self._pools(mix, [])
        for change in [*self._by_harm(mix)] * 2:  # a flag may help only after a later one
            if mix.served_by(pools):
                break
            if change in chosen:
                continue
            after = self._pools(mix, [*chosen, change])
            if after.tokens >= pools.tokens:
                chosen.append(change)
                pools = after
        if not mix.served_by(pools):
            return None
        for change in reversed(chosen):
            fewer = [each for each in chosen if each is not change]
            if mix.served_by(self._pools(mix, fewer)):
                chosen = fewer
        pools = self._pools(mix, chosen, fill=True)
        slots = pools.state_slots if pools.slots_per_request > 1 else 0
        own = (f"--max-running-requests {mix.users}", *([f"--max-mamba-cache-size {slots}"] if slots else []))
        return Split((*own, *(flag for flag, _ in chosen)), pools, mix.held_by(pools))

    def most(self, mix: Mix) -> Split | None:
        """Return the split for as many users as can be served; if all, with as many contexts as can be kept."""

        def largest(of: Callable[[int], Mix], wanted: int) -> int:
            return bisect_left(range(1, wanted + 1), True, key=lambda each: self.split(of(each)) is None)

        def of_users(users: int) -> Mix:
            return replace(mix, users=users, conversations=0)

        users = largest(of_users, mix.users)
        if users < mix.users:
            return self.split(of_users(users)) if users else None
        kept = largest(lambda each: replace(mix, conversations=each), mix.conversations)
        return self.split(replace(mix, conversations=kept))

    def _by_harm(self, mix: Mix) -> Iterator[tuple[str, dict[str, Any]]]:
        """Flags that free memory, from a larger static fraction to a narrower block.

        No draft window where a hybrid target is to keep contexts: a hit ends as many tokens early, at an older state,
        which would have to be kept too.
        """
        now = self._table.demand
        if (highest := self._highest()) > self._table.fraction:
            yield f"--mem-fraction-static {highest}", {"mem_fraction_static": highest}
        if now.state.slot and self._settings.replay_choice is None and not self._settings.replay_obstacle:
            yield REPLAY_FLAG, {"enable_linear_replayssm_spec": True}
        for flag, changes in single_values(self._settings, now):
            if not (mix.conversations and now.state.slot and flag.startswith(WINDOW_FLAG)):
                yield flag, changes

    def _pools(self, mix: Mix, changes: list[tuple[str, dict[str, Any]]], *, fill: bool = False) -> Pools:
        """Pools with the states that the mix needs; with ``fill``, as many as K/V can use."""
        settings = replace(self._settings, **{name: value for _, each in changes for name, value in each.items()})
        needed = replace(demand(settings, self._machine, self._pair), max_running=mix.users)
        static, slots = self._memory * (settings.mem_fraction_static or self._table.fraction), needed.slots_per_request

        def with_states(states: int | None) -> Pools:
            asked = needed if states is None else replace(needed, max_states=states)
            return divide(settings, self._machine, asked, static)[0]

        if not needed.state.slot or slots == 1:
            return with_states(None)
        outer = mix.users * (slots - 2)  # slots of the running requests without their own prefixes
        least = max(mix.users * slots, outer + mix.conversations)
        pools = with_states(least)
        if not fill:
            return pools
        # One more state costs its price in K/V, and is of use while K/V hold a context for it too.
        more = (pools.tokens - mix.context * (least - outer)) // (mix.context + pools.state_price)
        return with_states(least + more) if more > 0 else pools

    def _demand(self, **changes: Any) -> Demand:
        copies = self._table.demand.copies
        return demand(replace(self._settings, **changes), self._machine, self._pair, copies=copies)

    def _highest(self) -> float:
        return highest_fraction(self._table.fraction, self._table.outside, self._memory)

    def _best(self, tries: list[_Try]) -> Advice:
        fits = [divide_as_served(self._settings, self._machine, each, static)[1][0] for _, each, static in tries]
        index = best(fits, self._table.demand.context)
        return Advice(tries[index][0], fits[index].running, fits[index].tokens)

    def _tried(self, flag: str, changed: Demand) -> tuple[str, Pools]:
        """The flag and its pools; with the replay flag where a replay would end, as kept states take the K/V."""
        before, static = self._table.ways[0], self._memory * self._table.fraction
        after = divide(self._settings, self._machine, changed, static)[0]
        if before.replay and not after.replay:
            replaying = replace(self._settings, enable_linear_replayssm_spec=True)
            return f"{flag} {REPLAY_FLAG}", divide(replaying, self._machine, changed, static)[0]
        return flag, after


def _gains(advice: Advice, before: Pools, asked: int) -> bool:
    """Clearly more requests; or for a draft window, which only frees memory for K/V, as many and more tokens."""
    if advice.flag.startswith(WINDOW_FLAG):
        return advice.running >= before.running and advice.tokens > before.tokens
    return before.running < asked and advice.running >= min(asked, _CLEAR_GAIN * before.running + 1)
