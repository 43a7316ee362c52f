"""The drafter's rings against a ledger of who wrote which slot: no read of another request, nor of an older token."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang_dflash.plan.serving import DraftWindow
from sglang_dflash.upstream.worker import ReqToTokenPool
from sglang_dflash.worker.step import BlockKV
from sglang_dflash.worker.window import DraftRings

pytestmark = pytest.mark.sglang

BLOCK, CONTEXT, REQUESTS = 8, 384, 3


class Row:
    """As much of SGLang's record of a request's KV as ``ReqToTokenPool`` asks for."""

    req_pool_idx: int | None = None
    kv_allocated_len = 1

    @property
    def holds_kv(self) -> bool:
        return self.req_pool_idx is not None


@dataclass
class Request:
    """As much of SGLang's ``Req`` as a row needs."""

    rid: str
    kv: Row = field(default_factory=Row)
    start: int = 0  # tokens of the prefix hit
    length: int = 0


class Simulation:
    """Random prefills, chunks, steps, ends and retractions on the real request pool, and the ledger of writes."""

    def __init__(self, window: int, page: int, seed: int) -> None:
        self.random, self.window, self.page = random.Random(seed), window, page
        self.pool = ReqToTokenPool(REQUESTS, CONTEXT + BLOCK + 4, "cpu", False)
        self.rings = DraftRings(self.pool, DraftWindow(window, BLOCK, page), CONTEXT)
        self.ledger: dict[int, tuple[str, int]] = {}
        self.running: list[Request] = []
        self.arrived = 0

    def admit(self) -> None:
        """A new request with a prefix hit, prefilled in chunks."""
        request = Request(f"r{self.arrived}")
        self.arrived += 1
        assert self.pool.alloc([request]) is not None
        self.fill(request, self.random.randrange(0, 100) // self.page * self.page)
        self.running.append(request)

    def fill(self, request: Request, prefix: int) -> None:
        request.start = request.length = prefix
        for _ in range(self.random.randint(1, 3)):
            extend = self.random.randint(1, 60)
            batch = SimpleNamespace(
                reqs=[request],
                req_pool_indices_cpu=torch.tensor([request.kv.req_pool_idx]),
                prefix_lens=[request.length],
                extend_lens=[extend],
                seq_lens=torch.tensor([request.length + extend]),
            )
            tokens, positions, slots = self.rings.prefill(batch)
            assert (tokens == positions - request.length).all()
            request.length += extend
            assert tokens.max() == extend - 1
            self.write(request, positions, slots)

    def end(self) -> None:
        self.pool.free(self.running.pop(self.random.randrange(len(self.running))))

    def retract(self) -> None:
        """The request loses its row, and comes back at once with a prefix hit: often into the same row."""
        request = self.random.choice(self.running)
        self.pool.free(request)
        assert self.pool.alloc([request]) is not None
        self.fill(request, self.random.randrange(0, min(request.length, CONTEXT // 2)) // self.page * self.page)

    def decode(self) -> None:
        """One step of all requests: look at what it would read, and write its block."""
        rows = torch.tensor([request.kv.req_pool_idx for request in self.running])
        lens = torch.tensor([request.length for request in self.running])
        positions = lens[:, None] + torch.arange(BLOCK)
        batch: Any = SimpleNamespace(req_pool_indices=rows, req_pool_indices_cpu=rows)
        plans = SimpleNamespace(plan=SimpleNamespace)

        def view(host_lens: torch.Tensor, exact: bool) -> BlockKV:
            kv = BlockKV(BLOCK, lens, torch.zeros_like(positions).flatten(), host_lens, int(host_lens.sum()), exact)
            return self.rings.view(kv, positions.flatten(), batch, plans)

        bound = view(lens + 2 * BLOCK, exact=False)  # what the host knows if no backend asks for the lengths
        seen = view(lens + BLOCK, exact=True)
        assert seen.host_lens.tolist() == (seen.seq_lens + BLOCK).tolist() == seen.plan.seq_lens_cpu.tolist()
        part = seen.first(2, plans, rows)  # a drafter's, of a wider block
        assert part.slots.view(-1, 2).tolist() == seen.slots.view(-1, BLOCK)[:, :2].tolist()
        assert part.host_lens.tolist() == (part.seq_lens + 2).tolist() == part.plan.seq_lens_cpu.tolist()
        table = self.rings.request_pool.req_to_token
        for i, request in enumerate(self.running):
            visible = int(seen.seq_lens[i])
            oldest = max(request.start, (request.length - self.window) // self.page * self.page)
            assert visible == request.length - oldest
            slots = table[rows[i], :visible].tolist()
            assert [self.ledger[slot] for slot in slots] == [(request.rid, oldest + c) for c in range(visible)]
            blocks = seen.slots.view(-1, BLOCK)[i]
            assert table[rows[i], visible : visible + BLOCK].tolist() == blocks.tolist()
            assert visible + BLOCK <= bound.host_lens[i] <= self.window + self.page - 1 + BLOCK
            for page in range(0, visible, self.page):  # a page of the table is a page of the pool
                assert slots[page] % self.page == 0
        self.written_beyond(seen, positions)

    def written_beyond(self, seen: BlockKV, positions: torch.Tensor) -> None:
        for i, request in enumerate(self.running):
            self.write(request, positions[i], seen.slots.view(-1, BLOCK)[i])
            request.length += self.random.randint(1, BLOCK)

    def write(self, request: Request, positions: torch.Tensor, slots: torch.Tensor) -> None:
        assert slots.unique().numel() == slots.numel()
        assert self.page <= slots.min()
        assert slots.max() < self.page + self.rings.slots
        self.ledger.update(zip(slots.tolist(), ((request.rid, p) for p in positions.tolist()), strict=True))


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("window", [8, 24, 100, 2 * CONTEXT])
@pytest.mark.parametrize("seed", range(3))
def test_reads_only_its_own_last_tokens(window: int, page: int, seed: int) -> None:
    simulation = Simulation(window, page, seed)
    for _ in range(150):
        free, busy = len(simulation.running) < REQUESTS, bool(simulation.running)
        actions = (
            [simulation.admit] * free + [simulation.end, simulation.retract] * busy + [simulation.decode] * 8 * busy
        )
        simulation.random.choice(actions)()
        for request in [r for r in simulation.running if r.length >= CONTEXT + BLOCK]:
            simulation.running.remove(request)
            simulation.pool.free(request)
    assert simulation.arrived > 5


def test_another_turn_in_the_same_row_starts_over() -> None:
    """A streaming session keeps the row between turns; the ring may have gone past where the next turn begins."""
    simulation = Simulation(window=16, page=1, seed=0)
    simulation.admit()
    for _ in range(20):
        simulation.decode()
    turn = simulation.running[0]
    turn.rid += "-next"
    simulation.fill(turn, turn.length - 30)
    simulation.decode()
