"""Expected memory of one rank: what the pair takes, and how SGLang would divide a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from sglang_dflash.drafter.config import text_config
from sglang_dflash.errors import Doubt
from sglang_dflash.memory.fit import Demand, Fit, fit, share
from sglang_dflash.memory.machine import Machine
from sglang_dflash.memory.parameters import FAMILIES, is_known
from sglang_dflash.memory.table import Advice, Pools
from sglang_dflash.plan.advice import With, advice
from sglang_dflash.plan.demand import demand
from sglang_dflash.plan.pair import Pair
from sglang_dflash.states.choice import Weighed, is_replayed, weigh

MEM_FRACTION = 0.85  # assumed; SGLang computes one from the device and its graphs
_RATIO_UNSET = (None, 0.9)  # SGLang's default, indistinguishable from a user's own 0.9


@dataclass(frozen=True)
class MemoryTable:
    """The pair's demand and the division of a device's static memory, in bytes unless named otherwise.

    Attributes:
        replay: whether a verify keeps what tokens write, instead of the state after each of them.
        fit: the division.
        other: the division the other way; None for a dense target.
        weighed: both ways side by side; None for a dense target or without a device.
        advice: flags that would let more fit.
    """

    device: str
    static_bytes: int
    demand: Demand
    replay: bool
    fit: Fit
    other: Fit | None
    weighed: Weighed | None
    advice: list[Advice]

    @property
    def ways(self) -> list[Pools]:
        """As served, then the other way."""
        served = Pools.predicted(self.demand, self.fit, replay=self.replay)
        if self.other is None:
            return [served]
        return [served, Pools.predicted(self.demand, self.other, replay=not self.replay)]


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
    weighed = weigh(needed, static) if hybrid and static else None
    replay = hybrid and is_replayed(args, machine, asked_replay, weighed)
    other = fit(needed, static, replay=not replay) if hybrid else None
    if replay and static and args.mamba_full_memory_ratio in _RATIO_UNSET:
        args = With(args, mamba_full_memory_ratio=share(needed, static, replay=True))
        needed = demand_of(args)
        weighed = weighed and replace(weighed, running_replayed=fit(needed, static, replay=True).running)
    return MemoryTable(
        device=machine.name if memory else f"{machine.name}: sizes only",
        static_bytes=static,
        demand=needed,
        replay=replay,
        fit=fit(needed, static, replay=replay),
        other=other,
        weighed=weighed,
        advice=_advice(args, demand_of, replay, memory, fraction),
    )


def _advice(args: Any, demand_of: Callable[[Any], Demand], replay: bool, memory: int, fraction: float) -> list[Advice]:
    return advice(args, demand_of, replay=replay, memory=memory, fraction=fraction) if memory else []
