"""The memory table as lines of text: ``check`` predicts its numbers, a server reads them off its pools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from sglang_dflash.memory.fit import Demand, Fit, draft_slots
from sglang_dflash.memory.machine import size

_ABOUT, _EACH, _WHOLE = 32, 22, 13  # columns of text


@dataclass(frozen=True)
class Advice:
    """A flag, and the requests and tokens of K/V that fit with it."""

    flag: str
    running: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.flag} ({self.running} requests, {self.tokens} tokens of K/V)"


@dataclass(frozen=True)
class Pools:
    """Pools of one rank, in the units that SGLang allocates.

    Attributes:
        replay: whether verification keeps what tokens write, instead of the state after each of them.
        target_weights, drafter_weights: bytes.
        target_kv, draft_kv: bytes a token.
        state: bytes of a recurrent state, a slot; 0 for a dense target.
        scratch: bytes that the verify of one request keeps.
        tokens: slots of the target's K/V; 0 if no memory was divided.
        page: tokens of a K/V page; the pools have a page more.
        state_slots: recurrent states; the pool has one more.
        slots_per_request: of them, those of a running request.
        block: positions of a draft block.
        in_transfer: requests of a disaggregated server that hold rows beside the running ones; None for any other.
        asked, running: requests at once, ``--max-running-requests`` and what fits.
        ring: slots of the drafter's K/V that a request takes under a draft window; None without one.
    """

    replay: bool
    target_weights: int
    drafter_weights: int
    target_kv: int
    draft_kv: int
    state: int
    scratch: int
    tokens: int
    page: int
    state_slots: int
    slots_per_request: int
    block: int
    asked: int
    running: int
    ring: int | None = None
    in_transfer: int | None = None

    @classmethod
    def predicted(cls, demand: Demand, fit: Fit, *, replay: bool) -> Pools:
        return cls(
            replay=replay,
            target_weights=demand.target_weights,
            drafter_weights=demand.drafter_weights,
            target_kv=demand.target_kv,
            draft_kv=demand.draft_kv,
            state=demand.state_of(replay=replay).slot,
            scratch=demand.scratch(replay=replay),
            tokens=fit.tokens,
            page=demand.page,
            state_slots=fit.state_slots,
            slots_per_request=demand.slots_per_request,
            block=demand.block,
            asked=demand.max_running,
            running=fit.running,
            ring=demand.ring,
            in_transfer=demand.in_transfer,
        )

    @classmethod
    def allocated(
        cls,
        pools: Mapping[str, int],
        *,
        replay: bool,
        tokens: int,
        page: int,
        state_slots: int,
        slots_per_request: int,
        block: int,
        asked: int,
        running: int,
        ring: int | None = None,
        in_transfer: int | None = None,
    ) -> Pools:
        """From the bytes of whole pools, by the names that ``/server_info`` gives them (``memory_bytes``)."""
        return cls(
            replay=replay,
            target_weights=pools["target_weights"],
            drafter_weights=pools["drafter_weights"],
            target_kv=pools["target_kv"] // (tokens + page),
            draft_kv=pools["draft_kv"] // draft_slots(ring, tokens, running, in_transfer, page=page),
            state=pools["states"] // (state_slots + 1),
            scratch=pools["scratch"] // (running + (in_transfer or 0) + 1),
            tokens=tokens,
            page=page,
            state_slots=state_slots,
            slots_per_request=slots_per_request,
            block=block,
            asked=asked,
            running=running,
            ring=ring,
            in_transfer=in_transfer,
        )

    @property
    def held(self) -> int:
        """Requests that hold rows."""
        return self.running + (self.in_transfer or 0)

    @property
    def capped_by(self) -> Literal["--max-running-requests", "verify scratch", "recurrent states", "tokens of K/V"]:
        """The pool that keeps one more request from running. States and scratch share a budget: the larger of them."""
        if self.running >= self.asked:
            return "--max-running-requests"
        if not self.state or self.held < self.state_slots // self.slots_per_request:
            return "tokens of K/V"
        rows = self.asked if self.replay else self.running  # a replay's are set aside for every request asked for
        return "verify scratch" if rows * self.scratch > self.state_slots * self.state else "recurrent states"


def lines(ways: Sequence[Pools], advice: Sequence[Advice] = ()) -> list[str]:
    """The table: what a unit takes and what the whole takes, side by side for each way to keep states.

    Args:
        ways: one or two, of the same pair; the one that is served comes first.
        advice: of the first.
    """
    columns = [_column(pools) for pools in ways]
    table = [(about, [column[about] for column in columns]) for about in columns[0]]
    text = [(about.ljust(_ABOUT) + "".join(_cells(*cells) for cells in rows)).rstrip() for about, rows in table]
    return [*text, *(f"more would fit with {each}" for each in advice)]


def _column(pools: Pools) -> dict[str, tuple[str, str]]:
    """Two cells by what they are about; of memory that was not divided, the units alone."""
    rows = [("target's weights", "", pools.target_weights), ("drafter's weights", "", pools.drafter_weights)]
    heading = {}
    if pools.state:
        heading = {"states of a block": ("", "replayed" if pools.replay else "kept")}
        slots, whole = pools.slots_per_request, (pools.state_slots + 1) * pools.state
        rows += [(f"recurrent states, {slots} slots", f"{size(slots * pools.state)} a request", whole)]
        whole = (pools.held + 1) * pools.scratch
        rows += [(f"verify scratch, block of {pools.block}", f"{size(pools.scratch)} a request", whole)]
    kv_slots = pools.tokens + pools.page
    rows += [("target's K/V", f"{size(pools.target_kv)} a token", kv_slots * pools.target_kv)]
    if pools.ring is None:
        rows += [("drafter's K/V", f"{size(pools.draft_kv)} a token", kv_slots * pools.draft_kv)]
    else:
        each, held = f"{size(pools.ring * pools.draft_kv)} a request", (pools.running, pools.in_transfer)
        kv_slots = draft_slots(pools.ring, pools.tokens, *held, page=pools.page)
        rows += [(f"drafter's K/V, {pools.ring} slots", each, kv_slots * pools.draft_kv)]
    if pools.tokens == 0:
        return heading | {about: (each, "" if each else size(whole)) for about, each, whole in rows}
    totals = {
        "together": ("", size(sum(whole for *_, whole in rows))),
        "tokens of K/V": (f"{pools.tokens // max(1, pools.running)} a request", str(pools.tokens)),
        f"requests at once, of {pools.asked}": ("", str(pools.running)),
        "capped by": ("", pools.capped_by),
    }
    return heading | {about: (each, size(whole)) for about, each, whole in rows} | totals


def _cells(each: str, whole: str) -> str:
    return each.rjust(_EACH) + whole.rjust(_WHOLE) if each else whole.rjust(_EACH + _WHOLE)
