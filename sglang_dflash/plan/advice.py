"""Flags that would let more requests run, or hold more tokens or prefixes, with the numbers that each would give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from sglang_dflash.plan.pools import FLOOR, Demand, Outside, Pools, best, share
from sglang_dflash.plan.replay import FLAG as REPLAY_FLAG
from sglang_dflash.plan.sizes import SLOTS

WINDOW = 2048  # draft window, tokens
HIGHEST_FRACTION = 0.9  # of the device; activations and graphs take the rest
_WORTH_A_WORD = 1.1  # times as many requests or prefixes
_HIGHEST_RATIO = 10
_MOST_TRIES = 64  # values of one flag
WINDOW_FLAG = "--speculative-draft-window-size"


@dataclass(frozen=True)
class Advice:
    """A flag, and the requests, tokens of K/V and prefixes beside the requests that fit with it."""

    flag: str
    running: int
    tokens: int
    prefixes: int = 0

    def __str__(self) -> str:
        return f"{self.flag} ({self.running} requests, {self.tokens} tokens of K/V)"


# A flag with a value, and what it makes of demand and static bytes.
_Try = tuple[str, Demand, float]


def advice(
    args: Any,
    demand_of: Callable[[Any], Demand],
    divided: Callable[[Demand, float], Pools],
    *,
    memory: int,
    fractions: tuple[float, float],
) -> list[Advice]:
    """Return the mildest value of each flag that lets all requests run, or else the most.

    Args:
        args: server arguments by SGLang's names.
        demand_of: what one rank has to hold, for changed arguments.
        divided: how the server would divide so many static bytes.
        memory: bytes of the device.
        fractions: of it, static now and at most.
    """
    now, static = demand_of(args), memory * fractions[0]
    before = divided(now, static)
    ratio = share(now, static, replay=before.replay)
    flags: list[list[_Try]] = [
        list(_fractions(now, memory, *fractions)),
        [(f"--mamba-full-memory-ratio {ratio}", replace(now, state_share=ratio), static)],
        list(_fewer(now, before, static)),
        *([(flag, demand_of(With(args, **changes)), static)] for flag, changes in single_values(args, now)),
    ]
    found = [_best(tries, divided, now.context) for tries in flags if tries]
    return [each for each in found if _gains(each, before, now.max_running)]


def highest_fraction(fraction: float, outside: Outside | None, memory: int) -> float:
    """Return the largest static fraction that leaves what sampling, graphs and activations take, in hundredths."""
    room = outside.left - FLOOR if outside else memory
    return max(fraction, min(HIGHEST_FRACTION, int(100 * (fraction + room / memory)) / 100))


def _best(tries: list[_Try], divided: Callable[[Demand, float], Pools], context: int) -> Advice:
    fits = [divided(demand, static) for _, demand, static in tries]
    index = best(fits, context)
    return Advice(tries[index][0], fits[index].running, fits[index].tokens)


def _gains(advice: Advice, before: Pools, asked: int) -> bool:
    """Clearly more requests; or for a draft window, which only frees memory for K/V, as many and more tokens."""
    if advice.flag.startswith(WINDOW_FLAG):
        return advice.running >= before.running and advice.tokens > before.tokens
    return before.running < asked and advice.running >= min(asked, _WORTH_A_WORD * before.running + 1)


def _fractions(now: Demand, memory: int, fraction: float, highest: float) -> Iterator[_Try]:
    for percent in range(round(fraction * 100) + 1, round(highest * 100) + 1):
        yield f"--mem-fraction-static {percent / 100}", now, memory * percent / 100


def _fewer(now: Demand, before: Pools, static: float) -> Iterator[_Try]:
    """A replay sets scratch aside for every request asked for: asking for fewer leaves more for their states."""
    for running in range(now.max_running - 1, before.running, -step_down(now, before)):
        yield f"--max-running-requests {running}", replace(now, max_running=running), static


def step_down(now: Demand, before: Pools) -> int:
    """Between two numbers of requests that are tried: 1, but for numbers that nobody serves."""
    return 1 + (now.max_running - before.running) // _MOST_TRIES


def more_prefixes(
    args: Any, demand_of: Callable[[Any], Demand], divided: Callable[[Demand, bool | None], Pools], before: Pools
) -> list[Advice]:
    """Flags that keep more prefixes of a hybrid target beside the running requests: twice as many, or one a request.

    A draft window keeps no more of them, but frees K/V that pay for them.

    Args:
        args: server arguments by SGLang's names.
        demand_of: what one rank has to hold, for changed arguments.
        divided: how a server would divide its memory, given whether a replay was asked for (None: it is as now).
        before: the division as served.
    """
    now, kept = demand_of(args), before.prefixes()
    if not now.state.slot or now.slots_per_request == 1:
        return []
    wanted = kept + max(kept, before.running)
    slots = before.state_slots + wanted - kept

    def tried(flag: str, demand: Demand) -> tuple[str, Pools]:
        after = divided(demand, None)
        if before.replay and not after.replay:  # more states let all run with kept states too, which take the K/V
            return f"{flag} {REPLAY_FLAG}", divided(demand, True)
        return flag, after

    tries = [tried(f"--max-mamba-cache-size {slots}", replace(now, max_states=slots))]
    tries += [tried(flag, demand_of(With(args, **changes))) for flag, changes in single_values(args, now)]
    if now.max_states is None:
        ratios = (each / 10 for each in range(int(now.state_share * 10) + 1, _HIGHEST_RATIO * 10 + 1))
        raised = (tried(f"--mamba-full-memory-ratio {each}", replace(now, state_share=each)) for each in ratios)
        tries += list(islice((each for each in raised if each[1].prefixes() >= wanted), 1))
    found = []
    for flag, after in tries:
        gains = after.prefixes() > _WORTH_A_WORD * kept or flag.startswith(WINDOW_FLAG)
        if after.running >= before.running and gains:
            found.append(Advice(flag, after.running, after.tokens, after.prefixes()))
    return found


def single_values(args: Any, now: Demand) -> Iterator[tuple[str, dict[str, object]]]:
    """A flag and the arguments that it changes."""
    half = now.block // 2
    if half >= 4:  # less drafts next to nothing
        yield f"--speculative-num-draft-tokens {half}", {"speculative_num_draft_tokens": half}
    if now.ring is None:
        yield f"{WINDOW_FLAG} {WINDOW}", {"speculative_draft_window_size": WINDOW}
    if now.state.slot:
        if args.mamba_ssm_dtype is None:
            yield "--mamba-ssm-dtype bfloat16", {"mamba_ssm_dtype": "bfloat16"}
        if not args.disable_overlap_schedule and now.slots_per_request == SLOTS["extra_buffer"]:
            lazy = "extra_buffer_lazy"
            yield f"--mamba-radix-cache-strategy {lazy}", {"mamba_radix_cache_strategy": lazy}


class With:
    """Arguments with some changed. A server's own are a view that cannot be copied."""

    def __init__(self, args: Any, **changes: object) -> None:
        vars(self).update(changes)
        self._args = args

    def __getattr__(self, name: str) -> Any:
        return getattr(self._args, name)
