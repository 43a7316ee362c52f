"""The drafter's rings: who wrote which slot, and what a disaggregated pair moves.

Sessions: ``tests/worker/test_tails.py``; retractions of a pair: ``tests/serving/test_disaggregation.py``.
"""

from __future__ import annotations

import ctypes
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.disaggregation.base.conn import StateType
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

from sglang_dflash.features.transfer import describe_rings
from sglang_dflash.features.window import DraftRings
from sglang_dflash.launch.plan import DraftWindow, current
from sglang_dflash.step.step import BlockKV
from sglang_dflash_cpu.layers.pools import CpuKVPool

pytestmark = pytest.mark.sglang

BLOCK, CONTEXT, REQUESTS = 8, 384, 3


def request_pool() -> ReqToTokenPool:
    return ReqToTokenPool(REQUESTS, CONTEXT + BLOCK + 4, "cpu", False)


# --- a ledger of writes: no read of another text, nor of an older token


class Row:
    """As much of SGLang's record of a request's KV as ``ReqToTokenPool`` and the rings ask for."""

    req_pool_idx: int | None = None
    kv_allocated_len = 1
    cache_protected_len = 0
    mamba_last_track_seqlen: int | None = None

    @property
    def holds_kv(self) -> bool:
        return self.req_pool_idx is not None


class Request:
    """As much of SGLang's ``Req`` as a row needs; ``text`` has a name per token, and ``start`` is the oldest to see."""

    best_match_node = last_node = 0

    def __init__(self, rid: str) -> None:
        self.rid, self.kv, self.start = rid, Row(), 0
        self.text: list[tuple[str, int]] = []

    def write(self, tokens: int) -> None:
        self.text += [(self.rid, len(self.text) + i) for i in range(tokens)]


class Simulation:
    """Random prefills, chunks, steps, ends and retractions on the real request pool, a tree, and the ledger of writes.

    The tree takes prefixes of what requests wrote, up to ``LAG`` tokens back. A prefill may keep an older state.
    """

    LAG = 32

    def __init__(self, tokens: int, page: int, seed: int) -> None:
        self.random, self.page = random.Random(seed), page
        self.window = DraftWindow(tokens, BLOCK, page, lag=self.LAG, cached=True)
        self.pool = request_pool()
        self.rings = DraftRings(self.pool, self.window, CONTEXT)
        self.rings.pool = self
        self.ledger: dict[int, tuple[str, int]] = {}
        self.tree: dict[int, list[tuple[str, int]]] = {}
        self.running: list[Request] = []
        self.arrived = self.hits = self.misses = 0

    def move_kv_cache(self, to: torch.Tensor, source: torch.Tensor) -> None:
        assert not set(to.tolist()) & set(source.tolist())
        self.ledger.update(zip(to.tolist(), [self.ledger[slot] for slot in source.tolist()], strict=True))

    def admit(self) -> None:
        """A new request with a prefix hit, prefilled in chunks."""
        self.running.append(Request(f"r{self.arrived}"))
        self.arrived += 1
        self.enter(self.running[-1])

    def enter(self, request: Request) -> None:
        """The hit ends with a tail, or leaves a window to prefill."""
        assert self.pool.alloc([request]) is not None
        request.best_match_node, request.text = self.random.choice(list(self.tree.items()) or [(0, [])])
        request.text = request.text.copy()
        tail = self.rings.tails.find(request.best_match_node, len(request.text))
        request.start = len(request.text) if tail is None else self.window.start(len(request.text))
        self.hits, self.misses = self.hits + (tail is not None), self.misses + (tail is None)
        self.fill(request)

    def fill(self, request: Request) -> None:
        for _ in range(self.random.randint(1, 3)):
            prefix, extend = len(request.text), self.random.randint(1, 90)
            request.write(extend)
            state = self.random.randrange(prefix, prefix + extend + 1) // self.page * self.page
            far = self.random.random() < 0.5
            request.kv.mamba_last_track_seqlen = state if far and state > prefix else None
            batch: Any = SimpleNamespace(reqs=[request], prefix_lens=[prefix], extend_lens=[extend])
            batch.req_pool_indices = batch.req_pool_indices_cpu = torch.tensor([request.kv.req_pool_idx])
            tokens, positions, slots = self.rings.prefill(batch)
            assert (tokens == positions - prefix).all() and tokens.max() == extend - 1
            self.write(request, positions, slots)
            self.cache(request, request.kv.mamba_last_track_seqlen)

    def cache(self, request: Request, end: int | None = None) -> None:
        """The tree takes a prefix of the request; its copies run before the next block is written."""
        end = self.random.randrange(max(0, len(request.text) - self.LAG), len(request.text) + 1) if end is None else end
        request.kv.cache_protected_len = end = end // self.page * self.page
        if end:
            request.last_node = 1 + len(self.tree)
            self.tree[request.last_node] = request.text[:end]
            self.rings.store_tail(request)

    def end(self) -> None:
        request = self.running.pop(self.random.randrange(len(self.running)))
        self.cache(request)
        self.pool.free(request)

    def retract(self) -> None:
        """The request loses its row, and comes back at once with a prefix hit: often into the same row."""
        request = self.random.choice(self.running)
        self.pool.free(request)
        self.enter(request)

    def decode(self) -> None:
        """One step of all requests: look at what it would read, and write its block."""
        rows = torch.tensor([request.kv.req_pool_idx for request in self.running])
        lens = torch.tensor([len(request.text) for request in self.running])
        positions = lens[:, None] + torch.arange(BLOCK)
        batch: Any = SimpleNamespace(req_pool_indices=rows, req_pool_indices_cpu=rows)
        plans = SimpleNamespace(plan=SimpleNamespace)

        def view(host_lens: torch.Tensor, exact: bool) -> BlockKV:
            kv = BlockKV(BLOCK, lens, torch.zeros_like(positions).flatten(), host_lens, int(host_lens.sum()), exact)
            return self.rings.view(kv, positions.flatten(), batch, plans)

        self.rings.copy()
        bound = view(lens + 2 * BLOCK, exact=False)  # what the host knows if no backend asks for the lengths
        seen = view(lens + BLOCK, exact=True)
        blocks = seen.slots.view(-1, BLOCK)
        assert seen.host_lens.tolist() == (seen.seq_lens + BLOCK).tolist() == seen.plan.seq_lens_cpu.tolist()
        part = seen.first(2, plans, rows)  # a drafter's, of a wider block
        assert part.slots.view(-1, 2).tolist() == blocks[:, :2].tolist()
        assert part.host_lens.tolist() == (part.seq_lens + 2).tolist() == part.plan.seq_lens_cpu.tolist()
        for i, request in enumerate(self.running):
            visible, table = int(seen.seq_lens[i]), self.rings.request_pool.req_to_token[rows[i]].tolist()
            oldest = max(request.start, self.window.start(len(request.text)))
            assert visible == len(request.text) - oldest
            assert [self.ledger[slot] for slot in table[:visible]] == request.text[oldest:]
            assert table[visible : visible + BLOCK] == blocks[i].tolist()
            assert visible + BLOCK <= bound.host_lens[i] <= self.window.tokens + self.page - 1 + BLOCK
            assert not any(slot % self.page for slot in table[: visible : self.page]), (
                "a page of the table is the pool's"
            )
        for i, request in enumerate(self.running):
            committed = self.random.randint(1, BLOCK)
            before = len(request.text)
            request.write(BLOCK)
            self.write(request, positions[i], blocks[i])
            del request.text[before + committed :]

    def write(self, request: Request, positions: torch.Tensor, slots: torch.Tensor) -> None:
        assert slots.unique().numel() == slots.numel()
        assert self.page <= slots.min() and slots.max() < self.page + self.rings.slots
        self.ledger.update(zip(slots.tolist(), (request.text[p] for p in positions.tolist()), strict=True))


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("tokens", [8, 24, 100, 2 * CONTEXT])
@pytest.mark.parametrize("seed", range(3))
def test_reads_only_its_own_last_tokens(tokens: int, page: int, seed: int) -> None:
    simulation = Simulation(tokens, page, seed)
    for _ in range(150):
        busy = bool(simulation.running)
        actions = [simulation.admit] * (len(simulation.running) < REQUESTS)
        actions += [simulation.end, simulation.retract, *[simulation.decode] * 8] * busy
        simulation.random.choice(actions)()
        for request in [r for r in simulation.running if len(r.text) >= CONTEXT - 100]:
            simulation.running.remove(request)
            simulation.pool.free(request)
    assert simulation.arrived > 5
    held = simulation.rings.tails.info()
    assert simulation.hits and simulation.misses and held["evicted"]
    simulation.rings.forget("draft", None)
    assert simulation.rings.tails.info() == {**held, "prefixes": 0, "slots": 0}


# --- a disaggregated pair, on real pools


@pytest.mark.parametrize("page", [1, 16])
def test_an_item_of_a_row_is_its_ring(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read as the transfer reads: item ``r`` of a buffer begins at ``r`` times its bytes."""
    rings = DraftRings(request_pool(), DraftWindow(24, BLOCK, page), CONTEXT, by_row=True)
    names = ("types", "data_ptrs", "data_lens", "item_lens", "dim_per_tensor", "conv_shard_groups")
    args: Any = SimpleNamespace(**{f"state_{name}": [] for name in (*names, "slice_outer_counts", "layer_ids")})
    sizes = {"head_num": 2, "head_dim": 4, "layer_num": 2, "dtype": torch.float32, "device": "cpu"}
    pool = CpuKVPool(rings.slots, page_size=page, enable_memory_saver=False, enable_alt_stream=False, **sizes)
    buffers = [*pool.k_buffer, *pool.v_buffer]
    for number, buffer in enumerate(buffers):  # every number is another one
        buffer.copy_(torch.arange(buffer.numel()).view_as(buffer) + 0.01 * number)
    worker = SimpleNamespace(rings=rings, drafter=SimpleNamespace(token_to_kv_pool=pool))
    monkeypatch.setattr(current, "worker", worker, raising=False)
    describe_rings(None, args)
    assert args.state_types == [StateType.REQUEST_ROW]
    assert args.state_layer_ids == [list(range(len(buffers)))]
    [pointers], [lengths], [items] = args.state_data_ptrs, args.state_data_lens, args.state_item_lens
    for pointer, length, item, buffer in zip(pointers, lengths, items, buffers, strict=True):
        for row in range(1, REQUESTS + 1):
            assert (row + 1) * item <= length
            sent = torch.frombuffer(bytearray(ctypes.string_at(pointer + row * item, item)), dtype=torch.float32)
            assert torch.equal(sent, buffer[rings.slots_of(row)].flatten())
