"""Prediction of SGLang's division of a device's memory: weights, then recurrent states, then K/V.

SGLang 0.5.23 (``kv_cache_configurator.py``, ``_handle_max_mamba_cache``) gives recurrent states
``mamba_full_memory_ratio`` parts to one part of K/V, and charges verify scratch to the states.
"""

import math
from dataclasses import dataclass
from typing import Literal

from sglang_dflash.launch.division import (
    SLIDING_SHARE,
    STATE_SHARE,
    TokenPools,
    history_columns,
    state_slots,
    window_tokens,
)
from sglang_dflash.launch.plan import DraftWindow


@dataclass(frozen=True)
class Sizing:
    """What one rank stores, in bytes per unit, and its limits."""

    target_weights: int
    drafter_weights: int
    target_kv: int  # per token, without sliding layers that have their own pool
    draft_kv: int  # per token
    block: int  # positions
    slots_per_request: int  # recurrent states
    context: int  # tokens of the longest request
    max_running: int  # requested
    state: int = 0  # recurrent, of a request
    scratch: int = 0  # buffers of a request in a verify
    records: int = 0  # part of the scratch that a replay reads
    state_share: float = STATE_SHARE  # --mamba-full-memory-ratio
    max_tokens: int | None = None  # --max-total-tokens
    max_states: int | None = None  # --max-mamba-cache-size
    page: int = 1  # tokens
    window: DraftWindow | None = None  # sizes the drafter's K/V; None: as many slots as the target
    in_transfer: int | None = None  # requests with rows in addition to running ones
    copies: bool = False
    sliding_kv: int = 0  # per token of sliding layers, if they have a pool
    sliding_window: int = 0  # tokens before a query
    sliding_share: float = SLIDING_SHARE  # tokens per token of the full layers
    sliding_cap: int | None = None  # tokens for all requests, in place of the share
    indices: int = 0  # bytes per request with which graphs list its K/V slots, outside static memory

    @property
    def weights(self) -> int:
        return self.target_weights + self.drafter_weights

    @property
    def per_token(self) -> float:
        share = self.sliding_share * self.sliding_kv if self.sliding_cap is None else 0
        return self.target_kv + share + (self.draft_kv if self.window is None else 0)

    def window_slots(self, running: int) -> int:
        return 0 if self.window is None else self.window.slots(self.context, running, self.in_transfer)


@dataclass(frozen=True)
class Pools:
    """Predicted pools of one rank in SGLang's units, without padding."""

    sizing: Sizing
    static_bytes: int  # for weights and pools; 0 if unknown
    tokens: int  # 0 if memory does not hold one request
    state_slots: int
    running: int
    sliding_tokens: int = 0

    @property
    def held(self) -> int:
        return self.running + (self.sizing.in_transfer or 0)

    @property
    def history(self) -> int:
        """Bytes per request of the history for copied blocks, outside static memory."""
        sizing = self.sizing
        return 4 * history_columns(sizing.context, self.tokens, sizing.block) if sizing.copies else 0

    @property
    def units(self) -> dict[str, tuple[int, int, str]]:
        """Number, bytes and name of the units of each pool, padding included."""
        sizing, rows, kv = self.sizing, self.held + 1, self.tokens + self.sizing.page if self.tokens else 0
        sliding = self.sliding_tokens + sizing.page if sizing.sliding_kv else 0
        draft_kv = kv
        if kv and sizing.window is not None:
            draft_kv = sizing.window_slots(self.running) + (sizing.page if sizing.in_transfer is None else 0)
        return {
            "target_weights": (1, sizing.target_weights, "rank"),
            "drafter_weights": (1, sizing.drafter_weights, "rank"),
            "target_kv": (kv, sizing.target_kv, "token"),
            "sliding_kv": (sliding, sizing.sliding_kv, "token"),
            "draft_kv": (draft_kv, sizing.draft_kv, "token"),
            "states": (self.state_slots + 1, self.sizing.state, "state"),
            "scratch": (rows, self.sizing.scratch, "request"),
            "history": (rows, self.history, "request"),
        }

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes of whole pools."""
        return {pool: number * each for pool, (number, each, _) in self.units.items()}

    @property
    def kv(self) -> TokenPools:
        sizing = self.sizing
        if not sizing.sliding_kv:
            return TokenPools(self.tokens)
        window = window_tokens(sizing.sliding_window, sizing.block, sizing.page)
        return TokenPools(self.tokens, self.sliding_tokens, window)

    def requests_of(self, tokens: int) -> int:
        return min(self.running, self.kv.requests(min(tokens, self.sizing.context)))

    @property
    def prefixes(self) -> int:
        """Prefixes that a hybrid target's cache keeps in addition to those of running requests.

        SGLang counts one more slot per running request (``MambaComponent.prepare_for_caching_req``).
        """
        slots = self.sizing.slots_per_request
        return max(0, self.state_slots - self.running * (slots - 1)) if slots > 1 and self.sizing.state else 0

    @property
    def longest(self) -> int:
        """Tokens of one conversation, while no other request runs."""
        return min(self.sizing.context, self.kv.per_request(1)[0])

    @property
    def capped_by(self) -> Literal["--max-running-requests", "verify scratch", "recurrent states", "tokens of K/V"]:
        """The pool that is full first. States and scratch share a budget: the larger of the two."""
        if self.running >= self.sizing.max_running:
            return "--max-running-requests"
        if not self.sizing.state or self.held < self.state_slots // self.sizing.slots_per_request:
            return "tokens of K/V"
        scratch, states = self.sizing.max_running * self.sizing.scratch, self.state_slots * self.sizing.state
        return "verify scratch" if scratch > states else "recurrent states"


def fit(sizing: Sizing, static_bytes: float) -> Pools:
    """Divide ``static_bytes`` as SGLang does; 0 requests if one does not fit."""
    rest, slots, running = static_bytes - sizing.weights, 0, sizing.max_running
    if sizing.state:
        slots, running, rest = _fit_states(sizing, rest)
    tokens, sliding = _fit_tokens(sizing, rest - sizing.window_slots(running) * sizing.draft_kv)
    running = min(running, tokens // 2)
    if sizing.state:  # a decoding server has at least one per row
        slots = max(slots, running + (sizing.in_transfer or 0))
    return Pools(sizing, int(static_bytes), tokens if running else 0, slots, running, sliding if running else 0)


def _fit_tokens(sizing: Sizing, rest: float) -> tuple[int, int]:
    """Tokens of both K/V pools (``HybridSWAPoolConfigurator``). SGLang refuses a sliding pool of less than a window."""
    cap, page, most = sizing.sliding_cap, sizing.page, sizing.max_tokens or math.inf
    rest -= (cap or 0) * sizing.sliding_kv
    tokens = int(max(0, min(rest // max(1, sizing.per_token), most))) // page * page
    if not sizing.sliding_kv:
        return tokens, 0
    own = int(tokens * sizing.sliding_share) // page * page if cap is None else int(min(cap, most))
    return (tokens, own) if own > sizing.sliding_window + page else (0, 0)


def _fit_states(sizing: Sizing, rest: float) -> tuple[int, int, float]:
    """Return state slots, running requests, and the bytes left for K/V.

    SGLang omits convolution columns and requests in transfer; ``features/pool_sizes.py`` subtracts them.
    """
    rows = sizing.max_running + 1
    rest -= rows * (sizing.scratch - sizing.records) + (sizing.in_transfer or 0) * sizing.scratch
    records, slots = rows * sizing.records, sizing.max_states
    if slots is None:
        slots = state_slots(
            rest,
            ratio=sizing.state_share,
            records=records,
            slot=sizing.state,
            per_request=sizing.slots_per_request,
            requests=sizing.max_running if sizing.scratch else 0,  # SGLang alone divides a prefill server's memory
            token=sizing.per_token,
            context=sizing.context,
            window=0 if sizing.window is None else sizing.window.slots(sizing.context) * sizing.draft_kv,
        )
    return (
        slots,
        min(sizing.max_running, slots // sizing.slots_per_request),
        rest - records - sizing.state * (slots + 1),
    )
