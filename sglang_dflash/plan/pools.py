"""The division of a device's memory, computed before anything is loaded as SGLang will do it.

Weights come first, then recurrent states, then K/V. ``kv_cache_configurator.py`` of SGLang 0.5.23
(``_handle_max_mamba_cache``) gives the recurrent states ``mamba_full_memory_ratio`` parts to one part of K/V, and lets
requests run as long as each finds its state slots; a request holds 3 of them and up to 2 snapshots. Scratch for
verification comes out of the states' part."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Literal

from sglang_dflash.plan.sizes import StateBytes, history_columns

RAISED_BY = {  # by what caps the requests that run at once
    "verify scratch": "a narrower block (--speculative-num-draft-tokens), --mamba-full-memory-ratio",
    "recurrent states": "--mamba-full-memory-ratio, --mamba-ssm-dtype bfloat16",
    "tokens of K/V": "a lower --mamba-full-memory-ratio, --speculative-draft-window-size",
}


@dataclass(frozen=True)
class Demand:
    """Everything that one rank must hold, in bytes, and the flags that divide its memory.

    Attributes:
        target_weights, drafter_weights: bytes of parameters.
        weighed: whether the weights are those of safetensors headers, and served as they are stored: no estimate.
        target_kv, draft_kv: bytes a token.
        state: a request's recurrent state.
        block: positions of a draft block, tokens.
        slots_per_request: recurrent-state slots that a running request holds.
        context: tokens of the longest request.
        state_share: ``mamba_full_memory_ratio``, recurrent state's part to one part of K/V.
        max_running: requests that may run at once, as asked for.
        max_tokens, max_states: ``--max-total-tokens``, ``--max-mamba-cache-size``; None if SGLang decides.
        page: tokens of a K/V page.
        ring: slots of the drafter's pool that a request takes under a draft window; None without one.
        in_transfer: requests of a disaggregated server that hold rows beside the running ones; None for any other.
        replayed: the state where states are replayed, whose dtype may be another; None for the same.
        records: positions of a request's ring of records where states are replayed.
        copies: whether blocks are copied.
        verifies: whether blocks are verified. The prefill server of a disaggregated pair allocates no verify scratch.
    """

    target_weights: int
    drafter_weights: int
    target_kv: int
    draft_kv: int
    state: StateBytes
    block: int
    slots_per_request: int
    context: int
    state_share: float
    max_running: int
    max_tokens: int | None = None
    max_states: int | None = None
    page: int = 1
    ring: int | None = None
    in_transfer: int | None = None
    replayed: StateBytes | None = None
    records: int = 16
    copies: bool = False
    verifies: bool = True
    weighed: bool = False

    @property
    def weights(self) -> int:
        return self.target_weights + self.drafter_weights

    def state_of(self, *, replay: bool) -> StateBytes:
        return self.replayed or self.state if replay else self.state

    def scratch(self, *, replay: bool) -> int:
        """Bytes that the verify of one request keeps until its commit."""
        if not self.verifies:
            return 0
        state = self.state_of(replay=replay)
        return state.records(self.block, self.records) if replay else state.snapshots(self.block)


@dataclass(frozen=True)
class Pools:
    """Pools of one rank, in the units that SGLang allocates: predicted by :func:`fit`, or read off a server.

    Attributes:
        replay: whether verification keeps what tokens write, instead of the state after each of them.
        target_weights, drafter_weights: bytes.
        target_kv, draft_kv: bytes a token.
        state: bytes of a recurrent state, a slot; 0 for a dense target.
        scratch: bytes that the verify of one request keeps.
        tokens: slots of the target's K/V; 0 if no memory was divided, or it does not hold one request.
        page: tokens of a K/V page; the pools have a page more.
        state_slots: recurrent states; the pool has one more.
        slots_per_request: of them, those of a running request.
        block: positions of a draft block.
        in_transfer: requests of a disaggregated server that hold rows beside the running ones; None for any other.
        asked, running: requests at once, ``--max-running-requests`` and what fits.
        ring: slots of the drafter's K/V that a request takes under a draft window; None without one.
        history: bytes of a request's history, for copied blocks; 0 without. It lies beside the divided memory.
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
    history: int = 0

    @property
    def held(self) -> int:
        """Requests that hold rows."""
        return self.running + (self.in_transfer or 0)

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes of whole pools, by the names that ``/server_info`` gives them (``memory_bytes``)."""
        draft_rows = draft_slots(self.ring, self.tokens, self.running, self.in_transfer, page=self.page)
        return {
            "target_weights": self.target_weights,
            "drafter_weights": self.drafter_weights,
            "target_kv": (self.tokens + self.page) * self.target_kv if self.tokens else 0,
            "draft_kv": draft_rows * self.draft_kv if self.tokens else 0,
            "states": (self.state_slots + 1) * self.state,
            "scratch": (self.held + 1) * self.scratch,  # one more: the padding row
            "history": (self.held + 1) * self.history,
        }

    @property
    def state_price(self) -> int:
        """Tokens of K/V in the bytes of one recurrent state."""
        return -(-self.state // (self.target_kv + (self.draft_kv if self.ring is None else 0)))

    def prefixes(self, slots_per_request: int | None = None) -> int:
        """Distinct prefixes that stay in a hybrid target's cache beside those of the running requests, a slot each.

        A running request holds its state, its snapshots and its own prefix. What SGLang counts for it has a slot more,
        for what its prefill adds to the cache (``MambaComponent.prepare_for_caching_req``). Without a prefix cache, or
        for a dense target, 0.

        Args:
            slots_per_request: of another ``--mamba-radix-cache-strategy`` with as many slots; None for this one's.
        """
        slots = slots_per_request or self.slots_per_request
        return max(0, self.state_slots - self.running * (slots - 1)) if slots > 1 and self.state else 0

    @property
    def capped_by(self) -> Literal["--max-running-requests", "verify scratch", "recurrent states", "tokens of K/V"]:
        """The pool that keeps one more request from running. States and scratch share a budget: the larger of them."""
        if self.running >= self.asked:
            return "--max-running-requests"
        if not self.state or self.held < self.state_slots // self.slots_per_request:
            return "tokens of K/V"
        rows = self.asked if self.replay else self.running  # a replay's are set aside for every request asked for
        return "verify scratch" if rows * self.scratch > self.state_slots * self.state else "recurrent states"

    @property
    def requests(self) -> dict[str, int | str]:
        """Requests at once, for ``/server_info``, and where fewer run than asked for, the flags that raise them."""
        counts = {"asked": self.asked, "running": self.running, "capped_by": self.capped_by}
        return counts | ({"raised_by": RAISED_BY[self.capped_by]} if self.running < self.asked else {})


@dataclass(frozen=True)
class _States:
    """The states' part of a division, and the bytes that are left for K/V."""

    slots: int
    running: int
    left: float


def fit(demand: Demand, static_bytes: float, *, replay: bool = False) -> Pools:
    """Divide ``static_bytes`` (``mem_fraction_static`` of the device) as SGLang does.

    ``running`` and ``tokens`` are 0 if the memory does not even hold weights and one request.

    Args:
        replay: whether verification keeps what tokens write, instead of the state after each of them.
    """
    state = demand.state_of(replay=replay)
    states = _States(0, demand.max_running, static_bytes - demand.weights)
    if state.slot:
        states = (_beside_records if replay else _beside_snapshots)(demand, state, states.left)
    rest, per_token = states.left, demand.target_kv
    if demand.ring is None:
        per_token += demand.draft_kv
    else:
        rest -= rings(demand.max_running, demand.in_transfer) * demand.ring * demand.draft_kv
    tokens = max(0, int(rest // max(1, per_token))) // demand.page * demand.page
    if demand.max_tokens is not None:
        tokens = min(tokens, demand.max_tokens // demand.page * demand.page)
    running = min(states.running, tokens // 2)
    held = running + (demand.in_transfer or 0)
    slots = max(states.slots, held) if state.slot else 0  # a decoding server's pool has one for every row at least
    return Pools(
        replay=replay,
        target_weights=demand.target_weights,
        drafter_weights=demand.drafter_weights,
        target_kv=demand.target_kv,
        draft_kv=demand.draft_kv,
        state=state.slot,
        scratch=demand.scratch(replay=replay),
        tokens=tokens,
        page=demand.page,
        state_slots=slots,
        slots_per_request=demand.slots_per_request,
        block=demand.block,
        asked=demand.max_running,
        running=running,
        ring=demand.ring,
        in_transfer=demand.in_transfer,
        history=history_bytes(demand.context if demand.copies else None, tokens, demand.block),
    )


def history_bytes(context: int | None, tokens: int, block: int) -> int:
    """Bytes of a request's history; ``context`` is None where blocks are not copied."""
    return 0 if context is None else 4 * history_columns(context, tokens, block)


def rings(running: int, in_transfer: int | None) -> int:
    """Rings of the drafter's K/V. On a disaggregated server a row's number is its ring's place: padding has one too."""
    return running if in_transfer is None else 1 + running + in_transfer


def draft_slots(ring: int | None, tokens: int, running: int, in_transfer: int | None, *, page: int) -> int:
    """Slots of the drafter's pool: the target's, or under a draft window its rings; with the padding page."""
    if ring is None:
        return tokens + page
    return rings(running, in_transfer) * ring + (page if in_transfer is None else 0)


def _beside_snapshots(demand: Demand, state: StateBytes, rest: float) -> _States:
    """States and scratch shrink together: a request that finds no slots needs no scratch.

    SGLang budgets a whole slot for each position of the block, though convolution windows overlap.
    """
    slots, block = demand.max_states, demand.block if demand.verifies else 0
    if slots is None:
        budget = _states_share(demand, rest) - state.slot * (1 + block)
        slots = max(0, int(budget // (state.slot * (1 + block / demand.slots_per_request))))
    running = min(demand.max_running, slots // demand.slots_per_request)
    return _States(slots, running, rest - state.slot * ((running + 1) * block + slots + 1))


def _beside_records(demand: Demand, state: StateBytes, rest: float) -> _States:
    """Scratch is set aside for every request that was asked for, whether it finds slots or not.

    SGLang takes the records off the states' part. Our ``states/replay.py`` takes the convolution's windows, which
    it forgets, off the whole.
    """
    rows = demand.max_running + 1
    rest -= rows * state.windows(demand.block)
    records = rows * demand.records * state.record
    slots = demand.max_states
    if slots is None:
        slots = max(0, int((_states_share(demand, rest) - records - state.slot) // state.slot))
    running = min(demand.max_running, slots // demand.slots_per_request)
    return _States(slots, running, rest - records - state.slot * (slots + 1))


def _states_share(demand: Demand, rest: float) -> float:
    return max(0.0, rest) * demand.state_share / (1 + demand.state_share)


TOKENS_PER_REQUEST = 8192  # of K/V for each running request: with less, long answers are retracted and prefilled again
_HIGHEST = 10


def share(demand: Demand, static_bytes: float, *, replay: bool) -> float:
    """Return the lowest ratio, in tenths from the demand's on, that lets every request run; or else the most.

    A higher ratio than the demand's leaves K/V for one whole context. Where the demand's leaves less, it stays.
    """
    tenths = range(int(demand.state_share * 10) + 1, _HIGHEST * 10 + 1)
    ratios = [demand.state_share, *(each / 10 for each in tenths)]
    fits = [fit(replace(demand, state_share=ratio), static_bytes, replay=replay) for ratio in ratios]
    least = min(demand.context, fits[0].tokens)
    return ratios[best(takewhile(lambda each: each.tokens >= least, fits), demand.context)]


def best(fits: Iterable[Pools], context: int) -> int:
    """Index of the first division that lets the most requests run, counting those with K/V for a long answer.

    Args:
        context: tokens of the longest request.
    """
    running = [min(each.running, each.tokens // min(TOKENS_PER_REQUEST, context)) for each in fits]
    return running.index(max(running))


SPLITS = 8  # SGLang's --triton-attention-num-kv-splits
SAMPLED_AT_ONCE = 1 << 25  # probabilities that seeded draws filter at once (worker/sampling/seeded.py)
FLOOR = 2 << 30  # bytes that stay free for what a prefill needs while it runs
_FILTERS = 4  # copies of them that top-k, top-p and min-p keep at their peak


@dataclass(frozen=True)
class Reader:
    """A model whose attention is captured.

    Attributes:
        backend: SGLang's name of its attention backend.
        heads, head_dim: attention heads on one rank.
        window: tokens that sliding layers see; None without any.
        drafts: positions that it drafts at most, anchor included; 0 for the target.
    """

    backend: str
    heads: int
    head_dim: int
    window: int | None = None
    drafts: int = 0


@dataclass(frozen=True)
class Graphs:
    """What the graphs of a server are sized by.

    Attributes:
        batch: requests of the largest graph.
        widths: of a block, each with a set of graphs.
        context: tokens of the longest request.
        page: tokens of a K/V page.
    """

    batch: int
    widths: tuple[int, ...]
    context: int
    page: int


def buffers(graphs: Graphs, target: Reader, drafter: Reader) -> int:
    """Bytes of the buffers of all sets."""
    return sum(
        buffers_of(reader, graphs, width)
        for width in graphs.widths
        for reader in (target, drafter)
        if not reader.drafts or 1 < width <= reader.drafts  # nothing to draft, or no more than with other graphs
    )


def buffers_of(reader: Reader, graphs: Graphs, width: int) -> int:
    """Bytes of one set of one model; 0 for a backend that is not known."""
    rows, context, wrappers = graphs.batch * width, graphs.context, 1 if reader.window is None else 2
    table = graphs.batch * -(-context // graphs.page) * 4
    match reader.backend:
        case "fa3" | "fa4":  # plain decode, draft decode, verify, draft extension; and the pages' first positions
            return 4 * table + 3 * -(-context // graphs.page) * 8
        case "trtllm_mha":  # a bidirectional block is read as requests of their own
            return (4 + (width if reader.drafts else 0)) * table
        case "flashinfer":  # a slot number for each row and token, and a mask
            return rows * context * (4 * wrappers + 1)
        case "triton":  # the same with 64-bit numbers, and partial results of each split
            mask = 0 if reader.drafts else rows * (context + width)
            partial = rows * reader.heads * SPLITS * (reader.head_dim + 1) * 4
            return rows * (context + (reader.window or 0)) * 8 + mask + partial
    return 0


def sampling(rows: int, vocab: int) -> int:
    """Bytes at the peak of a step that samples: the logits in float32, and beside them either their softmax or the
    filters' copies of some rows."""
    logits = rows * vocab
    return 4 * (logits + max(logits, _FILTERS * min(logits, SAMPLED_AT_ONCE)))


def default_backend(major: int | None) -> str:
    """The attention backend that suits a GPU.

    Args:
        major: of its CUDA compute capability; None if unknown.
    """
    return {8: "fa3", 9: "fa3", 10: "trtllm_mha", 12: "trtllm_mha"}.get(major or 0, "flashinfer")


@dataclass(frozen=True)
class Outside:
    """Device memory that is not static, bytes.

    Attributes:
        sampling: at its peak.
        buffers: of the attention backends, for CUDA graphs.
        sets: of graphs, one for each width.
        left: of the device for activations and the graphs themselves; negative if the others do not fit.
    """

    sampling: int
    buffers: int
    sets: int
    left: int
