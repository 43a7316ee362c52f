"""Draft window: a ring of KV slots per request for the drafter, and the hook that sizes it.

Position ``p`` goes to slot ``p mod size`` of the request's ring. A slot table, rewritten each step, begins with the
oldest visible token. Lengths count from there; RoPE is already applied, at absolute positions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.runtime_context import get_disagg, get_schedule
from sglang.srt.utils.common import async_h2d_stack
from torch import Tensor

from sglang_dflash.features.feature import Feature
from sglang_dflash.features.tails import Slots, Tail, Tails
from sglang_dflash.launch.plan import DraftWindow, ServingPlan, current
from sglang_dflash.launch.settings import in_transfer
from sglang_dflash.ops import view_rings
from sglang_dflash.upstream.hooks import Hooks

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_dflash.step.step import BlockKV


class RowAllocator:
    post_capture_active = False

    def get_kvcache(self) -> RowAllocator:
        return self


class DraftRings(Feature):
    """Slots and slot table of the drafter's pool; the rows of ``request_pool`` are the requests.

    A ring holds the tokens injected since the request got its row, and those of the tail of its prefix hit. With
    ``by_row``, the ring of row ``r`` begins at slot ``r * size``, as SGLang's transfer expects. ``pool`` is set
    when the drafter's K/V are allocated.
    """

    pool: Any

    def __init__(self, request_pool: Any, window: DraftWindow, context: int, *, by_row: bool = False) -> None:
        rows, columns = request_pool.req_to_token.shape
        self.window = window
        self.size = window.ring_slots(context)
        # SGLang's padding row 0 has no ring; its table points to the padding slot
        self._first = self.size if by_row else window.page
        end, tails = self._first + (rows - 1) * self.size, (rows - 1) * window.tail_slots(context)
        self.tails = Tails(end, tails, window)
        self.slots = end - window.page + tails
        self.request_pool = ReqToTokenPool(
            rows - 1, max(columns, self.size), device=request_pool.device, enable_memory_saver=False
        )
        self._table = self.request_pool.req_to_token
        self._columns = torch.arange(self.size, device=self._table.device)
        self._oldest = torch.zeros(rows, dtype=torch.int64, device=self._table.device)
        self._oldest_cpu = torch.zeros(rows, dtype=torch.int64)
        self._generation = request_pool.req_generation
        self._owners: list[tuple[int, str] | None] = [None] * rows
        self._written = np.zeros(rows, dtype=np.int64)  # per row, the first position that was never written
        self._nodes: dict[int, tuple[Any, int]] = {}  # node and end of a row's last tail
        self._planned: dict[int, Tail] = {}  # tails that a prefill writes, by row
        self.copies: list[tuple[Slots, Slots]] = []  # between rings and tails, decided on the host: to, from
        self.restored: set[int] = set()  # restored from the host for a retracted request

    def prefill(self, batch: ScheduleBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Start rings, and select the tokens of a target extend for them and for tails.

        Returns int64 [T]: indices into the batch's tokens, absolute positions, slots.
        """
        rows, writes, first = batch.req_pool_indices_cpu.tolist(), [], 0
        extends = list(zip(rows, batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True))
        for row, req, prefix, _ in extends:
            self._start(row, req, prefix)
        self.copy()
        for row, req, prefix, extend in extends:
            length, shift = prefix + extend, first - prefix
            last = np.arange(length - min(extend, self.size), length)
            writes.append(np.stack([last + shift, last, self._ring(row, last)]))
            if tail := self._plan(row, prefix, length, req.kv.mamba_last_track_seqlen):
                last, slots = tail.unwritten()
                writes.append(np.stack([last + shift, last, slots]))
            self._written[row], first = length, first + extend
        self._show_oldest(batch, rows)
        tokens, positions, to = self._on_device(*np.concatenate(writes, axis=1))
        return tokens, positions, to

    def transferred(self, batch: ScheduleBatch) -> None:
        """Claim the rings of transferred and restored requests, which hold a window. Other rings start empty."""
        rows = batch.req_pool_indices_cpu.tolist()
        for row, req, length in zip(rows, batch.reqs, batch.seq_lens_cpu.tolist(), strict=True):
            self._owners[row] = int(self._generation[row]), req.rid
            kept = row in self.restored or not req.retracted_stain
            self._oldest_cpu[row] = self.window.start(length) if kept else self._page_start(length)
            self.restored.discard(row)
        self._show_oldest(batch, rows)

    def store_tail(self, req: Any) -> None:
        """Store the tail of a prefix that SGLang's tree has taken from a running or finished request."""
        node, end, row = req.last_node, req.kv.cache_protected_len, int(req.kv.req_pool_idx)
        if self.tails.find(node, end) is None:
            tail = self._planned.pop(row, None)
            if tail is None and (tail := self._take(row, end, self._held(row))):
                positions, slots = tail.unwritten()
                self.copies.append((slots, self._ring(row, positions)))
            if tail is not None:
                self.tails.store(node, tail)
        self._nodes[row] = node, end

    def copy(self) -> None:
        """Run :attr:`copies`. The tokens of the rings must be written."""
        for to_and_from in self.copies:
            self.pool.move_kv_cache(*self._on_device(*to_and_from))
        self.copies.clear()

    def info(self) -> dict[str, Any]:
        return {"tails": self.tails.info()}

    def forget(self, role: str, version: str | None) -> None:
        """Drop all tails, whose K/V are of other weights, also without a flush of the prefix cache."""
        self._planned.clear()
        self.tails.clear()

    def slots_of(self, row: int) -> Tensor:
        return self._first + (row - 1) * self.size + self._columns

    def view(self, kv: BlockKV, positions: Tensor, batch: ScheduleBatch, translator: Any) -> BlockKV:
        """Return the target's block in the drafter's pool; lengths count from its oldest visible token."""
        rows, width = batch.req_pool_indices, kv.width
        self._written[batch.req_pool_indices_cpu.numpy()] = kv.host_lens.numpy()
        sizes = {"first": self._first, "size": self.size, "window": self.window.tokens, "page": self.window.page}
        lengths, slots = view_rings(self._table, self._oldest, rows, kv.seq_lens, positions, **sizes)
        if kv.lens_are_exact:
            oldest = self._oldest_cpu[batch.req_pool_indices_cpu]
            window_start = self._page_start(kv.host_lens - width - self.window.tokens)
            host_lens = kv.host_lens - torch.maximum(oldest, window_start)
        else:
            host_lens = kv.host_lens.clamp(max=self.window.tokens + self.window.page - 1 + width)
        tokens = int(host_lens.numpy().sum())
        view = replace(kv, seq_lens=lengths, slots=slots, host_lens=host_lens, host_tokens=tokens)
        return view.planned(translator, rows)

    def _start(self, row: int, req: Any, prefix: int) -> None:
        """Start a ring with the tail of the prefix hit. A later chunk, or turn of a session, continues its ring.

        A resumed request has a new generation; the next turn of a streaming session a new ``rid``.
        """
        owner, before = (int(self._generation[row]), req.rid), self._owners[row]
        self._owners[row], start = owner, self.window.start(prefix)
        if before == owner or (before is not None and before[0] == owner[0] and self._held(row) <= start):
            return
        self._nodes.pop(row, None)
        self._oldest_cpu[row], tail = self._page_start(prefix), self.tails.find(req.best_match_node, prefix)
        if tail is not None:
            self._oldest_cpu[row], self._nodes[row] = start, (req.best_match_node, prefix)
            self.copies.append((self._ring(row, np.arange(start, prefix)), tail.slots))

    def _plan(self, row: int, prefix: int, length: int, state: int | None) -> Tail | None:
        """Take the tail at a recurrent state that this prefill stores, if the ring does not reach back as far."""
        if old := self._planned.pop(row, None):
            self.tails.release(old)
        if state is None or state <= prefix or self.window.start(state) >= length - self.size:
            return None
        if tail := self._take(row, state, prefix):
            self._planned[row] = tail
        return tail

    def _take(self, row: int, end: int, oldest: int) -> Tail | None:
        """Take a tail whose new tokens begin at ``oldest`` or later."""
        node, older = self._nodes.get(row, (None, 0))
        tail = self.tails.take(end, self.tails.find(node, older))
        if tail is not None and end - tail.new < oldest:
            self.tails.release(tail)
            return None
        return tail

    def _held(self, row: int) -> int:
        """Return the oldest position that a ring still holds."""
        return max(int(self._oldest_cpu[row]), int(self._written[row]) - self.size)

    def _page_start(self, position: Any) -> Any:
        return position - position % self.window.page

    def _ring(self, row: int, positions: Slots) -> Slots:
        return self._first + (row - 1) * self.size + positions % self.size

    def _show_oldest(self, batch: ScheduleBatch, rows: list[int]) -> None:
        self._oldest[batch.req_pool_indices] = self._on_device(self._oldest_cpu[rows].numpy())[0]

    def _on_device(self, *numbers: Slots) -> Tensor:
        return async_h2d_stack([torch.from_numpy(each) for each in numbers], device=self._table.device)


def allocate_rings(
    plan: ServingPlan, target: ModelRunner, drafter: TpModelWorker, pool_config: Any, request_pool: Any
) -> DraftRings:
    assert plan.window is not None
    rings = DraftRings(request_pool, plan.window, target.model_config.context_len, by_row=plan.role != "null")
    sizes = {"max_total_num_tokens": rings.slots, "full_max_total_num_tokens": None, "swa_max_total_num_tokens": None}
    drafter.alloc_memory_pool(
        memory_pool_config=replace(pool_config, **sizes),
        req_to_token_pool=rings.request_pool,
        token_to_kv_pool_allocator=RowAllocator(),
    )
    rings.pool = drafter.model_runner.token_to_kv_pool
    return rings


def charge_rings(
    original: Callable[..., Any], configurator: Any, budget_bytes: int, *, cap_tokens: int | None = None
) -> Any:
    """Hook around ``KVCacheConfigurator.config_from_budget``: subtract rings and tails from the K/V budget once, bytes.

    With ``cap_tokens`` SGLang resizes the pool after the rings are allocated
    (``SGLANG_ENABLE_POST_CAPTURE_KV_SIZING``).
    """
    if not configurator.dflash_draft_cell_size_per_token or configurator.is_draft_worker:
        return original(configurator, budget_bytes, cap_tokens=cap_tokens)
    if cap_tokens is None:
        running = max(1, int(get_schedule().max_running_requests) // configurator.attn_dp_size)
        if configurator.mambaish_config is not None:
            running = min(running, get_schedule().max_mamba_cache_size // configurator._calculate_mamba_ratio())
        window, context = current.worker.plan.window, configurator.model_config.context_len
        assert window is not None
        slots = window.slots(context, running, in_transfer(get_disagg()))
        budget_bytes -= slots * configurator.dflash_draft_cell_size_per_token
    targets_only = copy.copy(configurator)
    targets_only.spec_aux_config = copy.copy(configurator.spec_aux_config)
    targets_only.spec_aux_config.dflash_draft_num_layers = None
    targets_only.dflash_draft_cell_size_per_token = None
    return original(targets_only, budget_bytes, cap_tokens=cap_tokens)


HOOKS = Hooks(around={"mem_cache.kv_cache_configurator.KVCacheConfigurator.config_from_budget": charge_rings})
