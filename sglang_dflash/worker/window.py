"""Rings: the drafter's K/V under a draft window.

Without a window the drafter's pool has the target's slots, one per token. With one it has a ring of slots per
request: position ``p`` goes to slot ``p mod size`` of its ring, over a token that has left the window. The drafter
reads the ring through a slot table of its own, rewritten each step, whose first column is the oldest token that it
may see. Its attention counts lengths and distances from there; rotations stay absolute, Q and K have theirs already.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from sglang_dflash.plan import serving
from sglang_dflash.plan.pools import rings
from sglang_dflash.plan.serving import DraftWindow
from sglang_dflash.plan.settings import in_transfer
from sglang_dflash.upstream import ReqToTokenPool, async_h2d, get_disagg, get_schedule

if TYPE_CHECKING:
    from sglang_dflash.upstream import ScheduleBatch
    from sglang_dflash.worker.step import BlockKV


class RingWrites(NamedTuple):
    """The tokens of a prefill that the rings keep.

    Attributes:
        tokens: int64 [T], indices among the batch's tokens.
        positions: int64 [T], absolute positions.
        slots: int64 [T], slots of the drafter's pool.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor


class RowAllocator:
    """The allocator that SGLang wants for a pool's slots: a ring is handed out with its request's row.

    The drafter's runner and its attention backends ask it for nothing but the kind of pool that it hands out from.
    """

    post_capture_active = False  # the rings' size is known at the start, nothing is left to grow into

    def get_kvcache(self) -> RowAllocator:
        return self


class DraftRings:
    """Slots and slot table of the drafter's pool under a draft window.

    A ring holds what was injected since the request took its row, never the part of its prefix that another request
    computed: each row remembers its oldest position, and nothing older is read. How little of the prefix may be missing
    is decided by :func:`~sglang_dflash.worker.window.cap_prefix`.

    Args:
        request_pool: the target's ``ReqToTokenPool``, whose rows are the requests.
        window: what the drafter reads; from a page boundary on.
        context: the longest sequence, tokens.
        by_row: whether row ``r``'s ring begins at slot ``r * size``, where SGLang's transfer of request rows looks for
            it. It costs the slots of nearly one ring.
    """

    def __init__(self, request_pool: Any, window: DraftWindow, context: int, *, by_row: bool = False) -> None:
        rows, columns = request_pool.req_to_token.shape
        self._window = window
        self.size = window.ring_slots(context)
        # Row 0 is SGLang's padding row: it has no ring, its table stays on the padding slot, in the pool's first page.
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
        self._holders: list[tuple[int, str] | None] = [None] * rows
        self._restored: set[int] = set()

    def pool_config(self, target: Any) -> Any:
        """SGLang's ``MemoryPoolConfig`` of the drafter's pool, from the target's."""
        sizes = {
            "max_total_num_tokens": self.slots,
            "full_max_total_num_tokens": None,
            "swa_max_total_num_tokens": None,
        }
        return replace(target, **sizes)

    def prefill(self, batch: ScheduleBatch) -> RingWrites:
        """Select the tokens of a target extend to write: those that each request's last block can still see.

        A request that holds its row for the first time starts an empty ring; another chunk goes on in it, and so
        does a decode row of a mixed batch.
        """
        rows = batch.req_pool_indices_cpu.tolist()
        counts, ends, end_of_last = [], [], 0
        for row, req, prefix, extend in zip(rows, batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
            length = prefix + extend
            counts.append(min(extend, length - self._page_start(length - self._window.tokens)))
            end_of_last += extend
            ends.append(end_of_last)
            if not self._claim(row, req.rid):
                self._oldest_cpu[row] = self._page_start(prefix)
        total = sum(counts)
        oldest = self._oldest_cpu[rows].tolist()
        count, end, start, row_ids = async_h2d(
            [counts, ends, oldest, rows], dtype=torch.int64, device=self._table.device
        )
        self._oldest[row_ids] = start

        def per_token(per_request: Tensor) -> Tensor:
            return per_request.repeat_interleave(count, output_size=total)

        # Index of a token in the batch, and its position: the last ``count`` of each request.
        tokens = torch.arange(total, device=count.device) + per_token(end - count.cumsum(0))
        positions = tokens + per_token(batch.seq_lens - end)
        return RingWrites(tokens, positions, self._slots(per_token(row_ids), positions))

    def start_transferred(self, batch: ScheduleBatch) -> None:
        """Rings that another server filled, or that come back from the host: they reach back a whole window.

        A retracted request whose ring was not kept begins an empty one.
        """
        rows = batch.req_pool_indices_cpu.tolist()
        for row, req, length in zip(rows, batch.reqs, batch.seq_lens_cpu.tolist(), strict=True):
            self._claim(row, req.rid)
            kept = row in self._restored or not req.retracted_stain
            self._oldest_cpu[row] = self._page_start(max(0, length - self._window.tokens) if kept else length)
            self._restored.discard(row)
        self._oldest[batch.req_pool_indices] = async_h2d(
            self._oldest_cpu[rows].tolist(), dtype=torch.int64, device=self._table.device
        )

    def slots_of(self, row: int) -> slice:
        """The slots of a row's ring, in the drafter's pool."""
        first = self._first + (row - 1) * self.size
        return slice(first, first + self.size)

    def restored(self, row: int) -> None:
        """A retracted request's ring was written back, under this row."""
        self._restored.add(row)

    def view(self, kv: BlockKV, positions: Tensor, batch: ScheduleBatch, translator: Any) -> BlockKV:
        """The block as the drafter sees it: lengths from its oldest visible token on, slots of its own pool.

        Args:
            kv: the block in the target's pool.
            positions: int64 [bs * w], absolute positions of the block.
            translator: the drafter's ``kv_index_translator``.
        """
        rows, width = batch.req_pool_indices, kv.width
        start = self._first_read(self._oldest[rows], kv.seq_lens)
        self._table[rows, : self.size] = self._slots(rows[:, None], start[:, None] + self._columns).int()
        if kv.exact:
            oldest = self._oldest_cpu[batch.req_pool_indices_cpu]
            host_lens = kv.host_lens - self._first_read(oldest, kv.host_lens - width)
            host_lens_sum = int(host_lens.numpy().sum())
        else:
            bound = self._window.tokens + self._window.page - 1 + width
            host_lens = kv.host_lens.clamp(max=bound)
            host_lens_sum = min(kv.host_lens_sum, bound * len(host_lens))
        ring = replace(
            kv,
            seq_lens=kv.seq_lens - start,
            slots=self._slots(rows[:, None], positions.view(-1, width)).flatten(),
            host_lens=host_lens,
            host_lens_sum=host_lens_sum,
        )
        return ring.planned(translator, rows)

    def _claim(self, row: int, rid: str) -> bool:
        """Whether the ring is the request's already; takes it over if not.

        A row counts how often it was handed out, so a retracted request that gets its row back is a new holder. The
        next turn of a streaming session keeps row and count, but may begin before the ring's end: another ``rid``.
        """
        holder = int(self._generation[row]), rid
        known = self._holders[row] == holder
        self._holders[row] = holder
        return known

    def _first_read(self, oldest: Tensor, committed: Tensor) -> Tensor:
        """First position that a block after ``committed`` tokens reads, [bs], on either device."""
        return torch.maximum(oldest, self._page_start(committed - self._window.tokens))

    def _page_start(self, position: Any) -> Any:
        """First position of the page; ints and tensors. Of a negative position, a negative one."""
        return position - position % self._window.page

    def _slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Slots of positions."""
        return self._first + (rows - 1) * self.size + positions % self.size


def charge_rings(
    original: Callable[..., Any], configurator: Any, budget_bytes: int, *, cap_tokens: int | None = None
) -> Any:
    """Hook around ``KVCacheConfigurator.config_from_budget``.

    SGLang sizes the target's K/V pool so that a drafter's pool of as many slots fits beside it. Rings are a fixed
    amount: they are taken off the budget once, and a token then costs only what the target stores of it.

    Args:
        configurator: SGLang's ``KVCacheConfigurator`` of the target.
        budget_bytes: memory of this rank for the K/V of target and drafter.
        cap_tokens: the pool's size so far. SGLang passes it when it sizes the pool again after graph capture
            (``SGLANG_ENABLE_POST_CAPTURE_KV_SIZING``), from the memory that is free then: the rings exist already.
    """
    plan, per_token = serving.plan, configurator.dflash_draft_cell_size_per_token
    if plan is None or plan.window is None or not per_token or configurator.is_draft_worker:
        return original(configurator, budget_bytes, cap_tokens=cap_tokens)
    if cap_tokens is None:
        slots = plan.window.ring_slots(configurator.model_config.context_len)
        held = rings(int(get_schedule().max_running_requests), in_transfer(get_disagg()))
        budget_bytes -= held * slots * per_token
    targets_only = copy.copy(configurator)
    targets_only.spec_aux_config = copy.copy(configurator.spec_aux_config)
    targets_only.spec_aux_config.dflash_draft_num_layers = None
    targets_only.dflash_draft_cell_size_per_token = None
    return original(targets_only, budget_bytes, cap_tokens=cap_tokens)


def cap_prefix(longest: int, req: Any, input_len: int) -> int:
    """Hook after ``Req._compute_max_prefix_len``: leave the window's last tokens to the prefill.

    The prefix cache keeps the target's K/V. What the drafter reads of a prompt comes from the target's hidden states,
    which nothing keeps, and lives in the ring of the request that computed it. So a hit ends one window before the
    prompt does: the prefill recomputes at most that many tokens, and the first block already sees its whole window.

    Args:
        longest: SGLang's own bound, tokens.
        input_len: tokens of the request so far.
    """
    plan = serving.plan
    return longest if plan is None or plan.window is None else max(0, min(longest, input_len - plan.window.tokens))
