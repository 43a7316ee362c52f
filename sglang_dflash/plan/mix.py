"""The split of a device's memory that serves a stated mix: so many users at once, with so long a context each."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from sglang_dflash.plan.advice import WINDOW_FLAG, With, highest_fraction, single_values
from sglang_dflash.plan.demand import demand
from sglang_dflash.plan.machine import Machine
from sglang_dflash.plan.memory import MemoryTable, divide
from sglang_dflash.plan.pair import Pair
from sglang_dflash.plan.pools import Demand, Pools
from sglang_dflash.plan.replay import FLAG as REPLAY_FLAG
from sglang_dflash.plan.replay import asked_for, reason_against


@dataclass(frozen=True)
class Mix:
    """What a server is to hold at once.

    Attributes:
        users: requests that run at once.
        context: tokens of each, prompt and answer.
        conversations: contexts that stay in the prefix cache, those of the running requests among them.
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
class _Try:
    """Flags that free memory, the arguments with them, and what is divided then."""

    flags: tuple[str, ...]
    args: Any
    demand: Demand
    static: float

    @property
    def cost(self) -> tuple[int, bool]:
        return len(self.flags), any("dtype" in flag for flag in self.flags)


@dataclass(frozen=True)
class Split:
    """Flags, what they divide the memory into, and the contexts that stay warm."""

    flags: tuple[str, ...]
    pools: Pools
    conversations: int


class Splits:
    """Splits of a device between states and K/V, under the flags that free memory for either."""

    def __init__(self, args: Any, machine: Machine, pair: Pair, memory: MemoryTable) -> None:
        self._args, self._machine, self._pair = args, machine, pair
        self._tries = sorted(self._combined(memory), key=lambda each: each.cost)

    def best(self, mix: Mix) -> Split | None:
        """The split with the fewest flags that serves the mix; or None.

        Of several, one that leaves the target's rounding alone, and of these the one that keeps most contexts.
        No draft window where a hybrid target is to keep contexts: a hit ends as many tokens early, at an older state,
        which would have to be kept too.
        """
        best, cost = None, (0, False)
        for each in self._tries:
            if best is not None and each.cost > cost:
                break
            if (
                mix.conversations
                and each.demand.state.slot
                and each.demand.ring
                and WINDOW_FLAG in " ".join(each.flags)
            ):
                continue
            pools = self._divided(mix, each)
            if pools and (best is None or mix.held_by(pools) > best.conversations):
                best, cost = Split(each.flags, pools, mix.held_by(pools)), each.cost
        if best is None:
            return None
        slots = best.pools.state_slots if best.pools.slots_per_request > 1 else 0
        own = (f"--max-running-requests {mix.users}", *([f"--max-mamba-cache-size {slots}"] if slots else []))
        return replace(best, flags=(*own, *best.flags))

    def most(self, mix: Mix) -> Split | None:
        """The best split for as many users as can be served; if all of them, with as many contexts as can be kept."""

        def largest(of: Callable[[int], Mix], wanted: int) -> int:
            return bisect_left(range(1, wanted + 1), True, key=lambda each: self.best(of(each)) is None)

        def of_users(users: int) -> Mix:
            return replace(mix, users=users, conversations=0)

        users = largest(of_users, mix.users)
        if users < mix.users:
            return self.best(of_users(users)) if users else None
        kept = largest(lambda each: replace(mix, conversations=each), mix.conversations)
        return self.best(replace(mix, conversations=kept))

    def _combined(self, memory: MemoryTable) -> Iterator[_Try]:
        fraction, whole = memory.fraction, self._machine.memory or 0
        # A narrower block costs speed: it comes last.
        changes = sorted(single_values(self._args, memory.demand), key=lambda each: "draft-tokens" in each[0])
        highest = highest_fraction(fraction, memory.outside, whole)
        if memory.demand.state.slot and asked_for(self._args) is None and not reason_against(self._args):
            changes.append((REPLAY_FLAG, {"enable_linear_replayssm_spec": True}))
        if highest > fraction:
            changes.append((f"--mem-fraction-static {highest}", {"mem_fraction_static": highest}))
        for size in range(len(changes) + 1):
            for chosen in combinations(changes, size):
                args = With(self._args, **{name: value for _, change in chosen for name, value in change.items()})
                static = whole * (args.mem_fraction_static or fraction)
                yield _Try(tuple(flag for flag, _ in chosen), args, demand(args, self._machine, self._pair), static)

    def _divided(self, mix: Mix, tried: _Try) -> Pools | None:
        """Pools with as many states as K/V can go with them; None if they do not serve the mix."""
        needed = replace(tried.demand, max_running=mix.users)
        each, asked = needed.slots_per_request, asked_for(tried.args) if needed.state.slot else None
        if not needed.state.slot or each == 1:
            pools = divide(tried.args, self._machine, needed, tried.static, asked)[0]
            return pools if mix.served_by(pools) else None
        beside = mix.users * (each - 2)  # slots of the running requests without their own prefixes
        least = max(mix.users * each, beside + mix.conversations)

        def with_states(slots: int) -> Pools:
            return divide(tried.args, self._machine, replace(needed, max_states=slots), tried.static, asked)[0]

        pools = with_states(least)
        if not mix.served_by(pools):
            return None
        # A state more takes its price in K/V, and there is a use for it while K/V hold a context for it too.
        more = (pools.tokens - mix.context * (least - beside)) // (mix.context + pools.state_price)
        return with_states(least + more) if more > 0 else pools
