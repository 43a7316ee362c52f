"""What fits into one device: SGLang's own division of its memory, computed before anything is loaded.

Weights come first, then recurrent states, then K/V. ``kv_cache_configurator.py`` of SGLang 0.5.23 gives the
recurrent states ``mamba_full_memory_ratio`` parts to one part of K/V, and lets requests run as long as each finds its
state slots; a request holds 3 of them and up to 2 snapshots.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_dflash.memory.sizes import StateBytes


@dataclass(frozen=True)
class Demand:
    """What one rank has to hold, in bytes, and how it is divided.

    Attributes:
        target_weights, drafter_weights: bytes of parameters.
        target_kv, draft_kv: bytes a token.
        state: a request's recurrent state.
        block: positions of a draft block, tokens.
        slots_per_request: recurrent-state slots that a running request holds.
        state_share: ``mamba_full_memory_ratio``, recurrent state's part to one part of K/V.
        max_running: requests that may run at once, as asked for.
        max_tokens, max_states: ``--max-total-tokens``, ``--max-mamba-cache-size``; None if SGLang decides.
        page: tokens of a K/V page.
        ring: slots of the drafter's pool that a request takes under a draft window; None without one.
    """

    target_weights: int
    drafter_weights: int
    target_kv: int
    draft_kv: int
    state: StateBytes
    block: int
    slots_per_request: int
    state_share: float
    max_running: int
    max_tokens: int | None = None
    max_states: int | None = None
    page: int = 1
    ring: int | None = None


@dataclass(frozen=True)
class Fit:
    """How the memory is divided: bytes, unless the name says otherwise."""

    weights: int
    target_kv: int
    draft_kv: int
    states: int
    scratch: int
    tokens: int
    state_slots: int
    running: int


def fit(demand: Demand, static_bytes: float) -> Fit:
    """Divide ``static_bytes`` (``mem_fraction_static`` of the device) as SGLang does.

    ``running`` and ``tokens`` are 0 if the memory does not even hold weights and one request.
    """
    weights = demand.target_weights + demand.drafter_weights
    rest = static_bytes - weights
    state, scratch_slots, state_slots = demand.state, 0, 0
    running = demand.max_running
    if state.slot:
        # SGLang budgets a whole slot for each position of the block, though convolution windows overlap.
        if demand.max_states is not None:
            state_slots = demand.max_states
        else:
            share = max(0.0, rest) * demand.state_share / (1 + demand.state_share)
            per_slot = state.slot * (1 + demand.block / demand.slots_per_request)
            state_slots = max(0, int((share - state.slot * (1 + demand.block)) // per_slot))
        running = min(running, state_slots // demand.slots_per_request)
        scratch_slots = running + 1  # one more: the padding slot
        rest -= state.slot * (scratch_slots * demand.block + state_slots + 1)
    per_token = demand.target_kv
    if demand.ring is None:
        per_token += demand.draft_kv
    else:
        rest -= demand.max_running * demand.ring * demand.draft_kv
    tokens = max(0, int(rest // per_token)) // demand.page * demand.page
    if demand.max_tokens is not None:
        tokens = min(tokens, demand.max_tokens // demand.page * demand.page)
    running = min(running, tokens // 2)
    rows = tokens + demand.page if tokens else 0  # one padding page
    draft_rows = rows if demand.ring is None or not tokens else demand.max_running * demand.ring + demand.page
    return Fit(
        weights=weights,
        target_kv=rows * demand.target_kv,
        draft_kv=draft_rows * demand.draft_kv,
        states=(state_slots + 1) * state.slot,
        scratch=scratch_slots * state.scratch(demand.block),
        tokens=tokens,
        state_slots=state_slots,
        running=running,
    )
