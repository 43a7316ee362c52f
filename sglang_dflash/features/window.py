"""Draft window: a ring of KV slots per request for the drafter, and the hooks that size, transfer and back it up.

Position ``p`` goes to slot ``p mod size`` of the request's ring. A slot table, rewritten each step, begins with the
oldest visible token. Lengths count from there; RoPE is already applied, at absolute positions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.runtime_context import get_disagg, get_schedule
from sglang.srt.utils.common import async_h2d
from torch import Tensor

from sglang_dflash.features.feature import Feature
from sglang_dflash.ops import view_rings
from sglang_dflash.plan.division import rings
from sglang_dflash.plan.serving import DraftWindow, ServingPlan, current
from sglang_dflash.plan.settings import in_transfer
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

    A ring holds the tokens injected since the request got its row. With ``by_row``, row ``r``'s ring begins at slot ``r
    * size``, as SGLang's transfer expects.
    """

    def __init__(self, request_pool: Any, window: DraftWindow, context: int, *, by_row: bool = False) -> None:
        rows, columns = request_pool.req_to_token.shape
        self.window = window
        self.size = window.ring_slots(context)
        # SGLang's padding row 0 has no ring; its table points to the padding slot
        self._first = self.size if by_row else window.page
        self.slots = self._first - window.page + (rows - 1) * self.size
        self.request_pool = ReqToTokenPool(
            rows - 1, max(columns, self.size), device=request_pool.device, enable_memory_saver=False
        )
        self._table = self.request_pool.req_to_token
        self._columns = torch.arange(self.size, device=self._table.device)
        self._oldest = torch.zeros(rows, dtype=torch.int64, device=self._table.device)
        self._oldest_cpu = torch.zeros(rows, dtype=torch.int64)
        self._generation = request_pool.req_generation
        self._owners: list[tuple[int, str] | None] = [None] * rows
        self.restored: set[int] = set()  # restored from the host for a retracted request

    def prefill(self, batch: ScheduleBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Select the tokens of a target extend that the next block can still see.

        Returns int64 [T]: indices into the batch's tokens, absolute positions, slots.
        """
        rows = batch.req_pool_indices_cpu.tolist()
        counts, ends, end_of_last = [], [], 0
        for row, req, prefix, extend in zip(rows, batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
            length = prefix + extend
            counts.append(min(extend, length - self._page_start(length - self.window.tokens)))
            end_of_last += extend
            ends.append(end_of_last)
            if not self._claim(row, req.rid):
                self._oldest_cpu[row] = self._page_start(prefix)
        total, oldest = sum(counts), self._oldest_cpu[rows].tolist()
        lists = [counts, ends, oldest, rows]
        count, end, start, row_ids = async_h2d(lists, dtype=torch.int64, device=self._table.device)
        self._oldest[row_ids] = start

        def per_token(per_request: Tensor) -> Tensor:
            return per_request.repeat_interleave(count, output_size=total)

        tokens = torch.arange(total, device=count.device) + per_token(end - count.cumsum(0))
        positions = tokens + per_token(batch.seq_lens - end)
        return tokens, positions, self._slots(per_token(row_ids), positions)

    def transferred(self, batch: ScheduleBatch) -> None:
        """Claim transferred or restored rings: they hold a window. Others start empty."""
        rows = batch.req_pool_indices_cpu.tolist()
        for row, req, length in zip(rows, batch.reqs, batch.seq_lens_cpu.tolist(), strict=True):
            self._claim(row, req.rid)
            kept = row in self.restored or not req.retracted_stain
            self._oldest_cpu[row] = self._page_start(max(0, length - self.window.tokens) if kept else length)
            self.restored.discard(row)
        oldest = self._oldest_cpu[rows].tolist()
        self._oldest[batch.req_pool_indices] = async_h2d(oldest, dtype=torch.int64, device=self._table.device)

    def slots_of(self, row: int) -> Tensor:
        return self._first + (row - 1) * self.size + self._columns

    def view(self, kv: BlockKV, positions: Tensor, batch: ScheduleBatch, translator: Any) -> BlockKV:
        """Return the target's block in the drafter's pool; lengths count from its oldest visible token."""
        rows, width = batch.req_pool_indices, kv.width
        sizes = {"first": self._first, "size": self.size, "window": self.window.tokens, "page": self.window.page}
        lengths, slots = view_rings(self._table, self._oldest, rows, kv.seq_lens, positions, **sizes)
        if kv.exact:
            oldest = self._oldest_cpu[batch.req_pool_indices_cpu]
            window_start = self._page_start(kv.host_lens - width - self.window.tokens)
            host_lens = kv.host_lens - torch.maximum(oldest, window_start)
        else:
            host_lens = kv.host_lens.clamp(max=self.window.tokens + self.window.page - 1 + width)
        tokens = int(host_lens.numpy().sum())
        view = replace(kv, seq_lens=lengths, slots=slots, host_lens=host_lens, host_tokens=tokens)
        return view.planned(translator, rows)

    def _claim(self, row: int, rid: str) -> bool:
        """Claim the ring for a request; return whether it already owned it.

        A resumed request has a new generation; the next turn of a streaming session a new ``rid``.
        """
        owner = int(self._generation[row]), rid
        owned = self._owners[row] == owner
        self._owners[row] = owner
        return owned

    def _page_start(self, position: Any) -> Any:
        return position - position % self.window.page

    def _slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        return self._first + (rows - 1) * self.size + positions % self.size


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
    return rings


def charge_rings(
    original: Callable[..., Any], configurator: Any, budget_bytes: int, *, cap_tokens: int | None = None
) -> Any:
    """Hook around ``KVCacheConfigurator.config_from_budget``: subtract the rings from the K/V budget once, bytes.

    With ``cap_tokens`` SGLang resizes the pool after the rings are allocated
    (``SGLANG_ENABLE_POST_CAPTURE_KV_SIZING``).
    """
    if not configurator.dflash_draft_cell_size_per_token or configurator.is_draft_worker:
        return original(configurator, budget_bytes, cap_tokens=cap_tokens)
    if cap_tokens is None:
        budget_bytes -= ring_bytes(current.worker.plan, configurator)
    targets_only = copy.copy(configurator)
    targets_only.spec_aux_config = copy.copy(configurator.spec_aux_config)
    targets_only.spec_aux_config.dflash_draft_num_layers = None
    targets_only.dflash_draft_cell_size_per_token = None
    return original(targets_only, budget_bytes, cap_tokens=cap_tokens)


def ring_bytes(plan: ServingPlan, configurator: Any) -> int:
    if plan.window is None:
        return 0
    slots = plan.window.ring_slots(configurator.model_config.context_len)
    running = max(1, int(get_schedule().max_running_requests) // configurator.attn_dp_size)
    held = rings(running, in_transfer(get_disagg()))
    return held * slots * int(configurator.dflash_draft_cell_size_per_token or 0)


def cap_prefix(longest: int, req: Any, input_len: int) -> int:
    """Hook after ``Req._compute_max_prefix_len``: end a prefix hit, which lacks the drafter's K/V, one window early."""
    window = current.worker.plan.window
    assert window is not None
    return max(0, min(longest, input_len - window.tokens))


HOOKS = Hooks(
    around={"mem_cache.kv_cache_configurator.KVCacheConfigurator.config_from_budget": charge_rings},
    after={"managers.schedule_batch.Req._compute_max_prefix_len": cap_prefix},
)
