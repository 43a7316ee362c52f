"""Rings: the drafter's K/V where a draft window bounds what it reads.

Without a window the drafter's pool has the target's slots, one per token. With one it has a ring of slots per
request: position ``p`` goes to slot ``p mod size`` of its ring, over a token that has left the window. The drafter
reads the ring through a slot table of its own, rewritten each step, whose first column is the oldest token that it
may see. Its attention counts lengths and distances from there; rotations stay absolute, Q and K have theirs already.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sglang_dflash.upstream import ReqToTokenPool, async_h2d
from sglang_dflash.window.size import ring_slots
from sglang_dflash.worker.step import Step


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
    """Stands where SGLang wants the allocator of a pool's slots: a ring is handed out with its request's row.

    The drafter's runner and its attention backends ask it for nothing but the kind of pool that it hands out from.
    """

    post_capture_active = False  # the rings' size is known at the start, nothing is left to grow into

    def get_kvcache(self) -> RowAllocator:
        return self


class DraftRings:
    """Slots and slot table of the drafter's pool under a draft window.

    A ring holds what was injected since the request took its row, never the part of its prefix that another request
    computed: each row remembers its oldest position, and nothing older is read. How little of the prefix may be missing
    is decided by :mod:`~sglang_dflash.window.prefix_cap`.

    Args:
        request_pool: the target's ``ReqToTokenPool``, whose rows are the requests.
        window: context tokens that the drafter reads.
        block: positions of the widest block.
        page: slots of a KV page; the ring is read from a page boundary on.
        context: the longest sequence, tokens.
    """

    def __init__(self, request_pool: Any, *, window: int, block: int, page: int, context: int) -> None:
        rows, columns = request_pool.req_to_token.shape
        self.window, self.page = window, page
        self.size = ring_slots(window, block=block, page=page, context=context)
        # Row 0 is SGLang's padding row: it has no ring, its table stays on the padding slot.
        self.slots = (rows - 1) * self.size
        self.request_pool = ReqToTokenPool(
            rows - 1, max(columns, self.size), device=request_pool.device, enable_memory_saver=False
        )
        self._table = self.request_pool.req_to_token
        self._columns = torch.arange(self.size, device=self._table.device)
        self._oldest = torch.zeros(rows, dtype=torch.int64, device=self._table.device)
        self._generation = request_pool.req_generation
        self._holders: list[tuple[int, str] | None] = [None] * rows

    def pool_config(self, target: Any) -> Any:
        """SGLang's ``MemoryPoolConfig`` of the drafter's pool, from the target's."""
        sizes = {
            "max_total_num_tokens": self.slots,
            "full_max_total_num_tokens": None,
            "swa_max_total_num_tokens": None,
        }
        return replace(target, **sizes)

    def prefill(self, batch: Any) -> RingWrites:
        """What to write of a target extend: the tokens that its last block can still see, for each request.

        A request that holds its row for the first time starts an empty ring; another chunk goes on in it, and so
        does a decode row of a mixed batch.
        """
        rows = batch.req_pool_indices_cpu.tolist()
        counts, oldest, ends, end_of_last = [], [], [], 0
        for row, req, prefix, extend in zip(rows, batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
            length = prefix + extend
            counts.append(min(extend, length - self._page_start(length - self.window)))
            end_of_last += extend
            ends.append(end_of_last)
            oldest.append(-1 if self._holds(row, req.rid) else self._page_start(prefix))
        total = sum(counts)
        count, end, start, row_ids = async_h2d(
            [counts, ends, oldest, rows], dtype=torch.int64, device=self._table.device
        )
        self._oldest[row_ids] = torch.where(start < 0, self._oldest[row_ids], start)

        def per_token(per_request: Tensor) -> Tensor:
            return per_request.repeat_interleave(count, output_size=total)

        # Index of a token in the batch, and its position: the last ``count`` of each request.
        tokens = torch.arange(total, device=count.device) + per_token(end - count.cumsum(0))
        positions = tokens + per_token(batch.seq_lens - end)
        return RingWrites(tokens, positions, self._slots(per_token(row_ids), positions))

    def view(self, step: Step, rows: Tensor, translator: Any) -> Step:
        """The step as the drafter sees it: lengths from its oldest visible token on, slots of its own pool.

        Args:
            rows: int64 [bs], ``req_pool_indices``.
            translator: the drafter's ``kv_index_translator``.
        """
        start = torch.maximum(self._oldest[rows], self._page_start(step.seq_lens - self.window))
        self._table[rows, : self.size] = self._slots(rows[:, None], start[:, None] + self._columns).int()
        slots = self._slots(rows[:, None], step.block.positions.view(-1, step.width)).flatten()
        lens = step.seq_lens - start
        bound = self.window + self.page - 1 + step.width
        host_lens = step.host_lens.clamp(max=bound)
        plan = translator.plan(
            req_pool_indices=rows,
            seq_lens=lens,
            seq_lens_cpu=host_lens,
            write_virtual=slots,
            read_extent=step.width,
        )
        return replace(
            step,
            seq_lens=lens,
            block=step.block._replace(slots=slots),
            kv_loc_plan=plan,
            host_lens=host_lens,
            host_lens_sum=min(step.host_lens_sum, bound * rows.shape[0]),
        )

    def _holds(self, row: int, rid: str) -> bool:
        """Whether the ring is the request's already; takes it over if not.

        A row counts how often it was handed out, so a retracted request that gets its row back is a new holder. The
        next turn of a streaming session keeps row and count, but may begin before the ring's end: another ``rid``.
        """
        holder = int(self._generation[row]), rid
        known = self._holders[row] == holder
        self._holders[row] = holder
        return known

    def _page_start(self, position: Any) -> Any:
        """First position of the page; ints and tensors. Of a negative position, a negative one."""
        return position - position % self.page

    def _slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Slots of positions; the pool's first page is padding."""
        return self.page + (rows - 1) * self.size + positions % self.size
