"""Expected memory of one rank: what the pair takes, and how SGLang would divide a device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from sglang_dflash.drafter.config import text_config
from sglang_dflash.errors import Doubt
from sglang_dflash.plan.advice import Advice, With, advice, highest_fraction, more_prefixes
from sglang_dflash.plan.demand import demand
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
from sglang_dflash.plan.replay import is_replayed
from sglang_dflash.plan.sizes import FAMILIES, count, head_size, is_known

MEM_FRACTION = 0.85  # assumed; SGLang computes one from the device and its graphs
_RATIO_UNSET = (None, 0.9)  # SGLang's default, indistinguishable from a user's own 0.9


@dataclass(frozen=True)
class MemoryTable:
    """The pair's demand and the division of a device's static memory.

    Attributes:
        device: its name.
        static_bytes: 0 if the device's memory is unknown.
        fraction: of the device's memory, static.
        demand: what is divided, and how.
        ways: the division as served; then, for a hybrid target, with states the other way.
        advice: flags that would let more fit.
        prefixes: flags that would keep more prefixes, or pay for them.
        outside: what else the device must hold; None if its memory is unknown, or on a CPU.
    """

    device: str
    static_bytes: int
    fraction: float
    demand: Demand
    ways: list[Pools]
    advice: list[Advice]
    prefixes: list[Advice]
    outside: Outside | None = None


def expected_memory(
    args: Any, machine: Machine, pair: Pair, asked_replay: bool | None, widths: tuple[int, ...], *, copies: bool
) -> MemoryTable:
    """Divide the machine's memory as SGLang will.

    A server that replays states gets the lowest ``--mamba-full-memory-ratio`` that lets all requests run and leaves
    K/V for a whole context (:func:`~sglang_dflash.plan.pools.share`), unless the user chose one.

    Args:
        args: server arguments by SGLang's names.
        asked_replay: the user's choice between replayed and kept states; None if open.
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

    def demand_of(changed: Any) -> Demand:
        return demand(changed, machine, pair, copies=copies)

    needed, memory, fraction = demand_of(args), machine.memory or 0, args.mem_fraction_static or MEM_FRACTION
    static = int(memory * fraction)
    if not memory:
        ways = divide(args, machine, needed, static, asked_replay)
        return MemoryTable(f"{machine.name}: sizes only", static, fraction, needed, ways, [], [])

    def served(changed: Demand, static: float) -> tuple[Demand, list[Pools]]:
        ways = divide(args, machine, changed, static, asked_replay)
        if ways[0].replay and args.mamba_full_memory_ratio in _RATIO_UNSET:
            changed = replace(changed, state_share=share(changed, static, replay=True))
            ways[0] = fit(changed, static, replay=True)
        return changed, ways

    own, ways = served(needed, static)
    room = memory - static - ways[0].bytes["history"]
    beside = outside(args, machine, pair, own, widths, room) if machine.kind == "gpu" else None
    found = advice(
        args,
        demand_of,
        lambda changed, static: served(changed, static)[1][0],
        memory=memory,
        fractions=(fraction, highest_fraction(fraction, beside, memory)),
    )
    shared = With(args, mamba_full_memory_ratio=own.state_share)

    def divided(changed: Demand, replay: bool | None) -> Pools:
        return divide(args, machine, changed, static, replay or asked_replay)[0]

    more = more_prefixes(shared, demand_of, divided, ways[0])
    return MemoryTable(machine.name, static, fraction, own, ways, found, more, beside)


def divide(args: Any, machine: Machine, needed: Demand, static: float, asked_replay: bool | None) -> list[Pools]:
    """The division as served; then, where a hybrid target's blocks are verified, with states the other way."""
    kept = fit(needed, static)
    if not needed.state.slot or not needed.verifies:
        return [kept]
    replayed = fit(needed, static, replay=True)
    replay = is_replayed(args, machine, asked_replay, lets_more_run=kept.running < replayed.running)
    return [replayed, kept] if replay else [kept, replayed]


def outside(args: Any, machine: Machine, pair: Pair, demand: Demand, widths: tuple[int, ...], room: int) -> Outside:
    """Memory of one rank outside the static share, of ``room`` bytes."""
    text, drafter, tp = text_config(pair.target), pair.drafter, args.tp_size
    usual = default_backend(machine.capability and machine.capability[0])
    general = args.attention_backend or usual
    targets, drafters = (args.prefill_attention_backend or general), args.speculative_draft_attention_backend
    heads = count(text, "num_attention_heads")
    drafts = drafter.block_size or demand.block
    readers = (
        Reader(targets, heads // tp, head_size(text)),
        Reader(drafters or targets, drafter.num_heads // tp, drafter.head_dim, drafter.sliding_window, drafts),
    )
    captured = not args.disable_decode_cuda_graph and args.cuda_graph_backend_decode != "disabled"
    batch = min(demand.max_running, args.cuda_graph_max_bs_decode or demand.max_running)
    context = args.context_length or count(text, "max_position_embeddings", drafter.max_position_embeddings)
    taken = buffers(Graphs(batch, widths, context, demand.page), *readers) if captured else 0
    peak = sampling(demand.max_running * demand.block, count(text, "vocab_size", drafter.vocab_size))
    return Outside(peak, taken, len(widths), room - peak - taken)
