"""Expected memory of one rank: what the pair takes, and how SGLang would divide a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_dflash.drafter.config import text_config
from sglang_dflash.errors import Doubt
from sglang_dflash.memory.fit import Demand, Pools, fit, share
from sglang_dflash.memory.machine import Machine
from sglang_dflash.memory.parameters import FAMILIES, is_known
from sglang_dflash.memory.table import Advice
from sglang_dflash.plan.advice import With, advice
from sglang_dflash.plan.demand import demand
from sglang_dflash.plan.pair import Pair
from sglang_dflash.states.choice import is_replayed

MEM_FRACTION = 0.85  # assumed; SGLang computes one from the device and its graphs
_RATIO_UNSET = (None, 0.9)  # SGLang's default, indistinguishable from a user's own 0.9


@dataclass(frozen=True)
class MemoryTable:
    """The pair's demand and the division of a device's static memory.

    Attributes:
        device: its name.
        static_bytes: 0 if the device's memory is unknown.
        demand: what is divided, and how.
        ways: the division as served; then, for a hybrid target, with states the other way.
        advice: flags that would let more fit.
    """

    device: str
    static_bytes: int
    demand: Demand
    ways: list[Pools]
    advice: list[Advice]


def expected_memory(args: Any, machine: Machine, pair: Pair, asked_replay: bool | None) -> MemoryTable:
    """Divide the machine's memory as SGLang will.

    A server that replays states gets the lowest ``--mamba-full-memory-ratio`` that lets all requests run, unless the
    user chose one.

    Args:
        args: server arguments by SGLang's names.
        asked_replay: the user's choice between replayed and kept states; None if open.

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

    def demand_of(changed: Any) -> Demand:
        return demand(changed, machine, pair)

    needed, memory, fraction = demand_of(args), machine.memory or 0, args.mem_fraction_static or MEM_FRACTION
    static, hybrid = int(memory * fraction), bool(needed.state.slot)
    kept, replay = fit(needed, static), False
    ways = [kept]
    if hybrid:
        replayed = fit(needed, static, replay=True)
        replay = is_replayed(args, machine, asked_replay, lets_more_run=kept.running < replayed.running)
        if replay and static and args.mamba_full_memory_ratio in _RATIO_UNSET:
            args = With(args, mamba_full_memory_ratio=share(needed, static, replay=True))
            needed = demand_of(args)
            replayed = fit(needed, static, replay=True)
        ways = [replayed, kept] if replay else [kept, replayed]
    found = advice(args, demand_of, replay=replay, memory=memory, fraction=fraction) if memory else []
    return MemoryTable(machine.name if memory else f"{machine.name}: sizes only", static, needed, ways, found)
