"""Draft window: a ring of KV slots per request for the drafter, and two hooks that account for it.

Without a window the drafter's pool has the target's slots, one per token. With a window, position ``p`` goes to slot
``p mod size`` of the request's ring and overwrites a token that has left the window. The drafter reads the ring through
a separate slot table, rewritten each step, whose first column is the oldest visible token. Its attention counts lengths
and distances from there; RoPE is already applied, at absolute positions.
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
    """Tokens of a prefill that are written to the rings.

    Attributes:
        tokens: int64 [T], indices into the batch's tokens.
        positions: int64 [T], absolute positions.
        slots: int64 [T], slots of the drafter's pool.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor


class RowAllocator:
    """Placeholder for SGLang's slot allocator: a ring is allocated with its request's row.

    The drafter's runner and attention backends read only its pool type.
    """

    post_capture_active = False  # the rings have a fixed size

    def get_kvcache(self) -> RowAllocator:
        return self


class DraftRings:
    """Slots and slot table of the drafter's pool under a draft window.

    A ring holds the tokens injected since the request got its row, not the part of its prefix that another request
    computed. Each row stores its oldest position, and older positions are never read. :func:`cap_prefix` bounds the
    missing part of the prefix.

    Args:
        request_pool: the target's ``ReqToTokenPool``; its rows are the requests.
        window: range that the drafter reads, rounded to a page boundary.
        context: length of the longest sequence, tokens.
        by_row: whether row ``r``'s ring begins at slot ``r * size``, as SGLang's transfer of request rows expects. It
            costs the slots of nearly one ring.
    """

    def __init__(self, request_pool: Any, window: DraftWindow, context: int, *, by_row: bool = False) -> None:
        rows, columns = request_pool.req_to_token.shape
        self._window = window
        self.size = window.ring_slots(context)
        # Row 0 is SGLang's padding row. It has no ring; its table points to the padding slot in the pool's first page.
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
        self._restored: set[int] = set()

    def pool_config(self, target: Any) -> Any:
        """Return SGLang's ``MemoryPoolConfig`` of the drafter's pool, from the target's."""
        sizes = {
            "max_total_num_tokens": self.slots,
            "full_max_total_num_tokens": None,
            "swa_max_total_num_tokens": None,
        }
        return replace(target, **sizes)

    def prefill(self, batch: ScheduleBatch) -> RingWrites:
        """Select the tokens of a target extend to write: those that the block after each request can still see.

        A request that is new in its row starts an empty ring; a later chunk, or a decoding request of a mixed batch,
        continues its ring.
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

        # Index in the batch and position of the last ``count`` tokens of each request.
        tokens = torch.arange(total, device=count.device) + per_token(end - count.cumsum(0))
        positions = tokens + per_token(batch.seq_lens - end)
        return RingWrites(tokens, positions, self._slots(per_token(row_ids), positions))

    def start_transferred(self, batch: ScheduleBatch) -> None:
        """Claim rings that another server filled, or that were restored from the host: they hold a whole window.

        A retracted request whose ring was not kept starts an empty one.
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
        """Return the slots of a row's ring in the drafter's pool."""
        first = self._first + (row - 1) * self.size
        return slice(first, first + self.size)

    def restored(self, row: int) -> None:
        """Mark the ring of this row as restored from the host, for a retracted request."""
        self._restored.add(row)

    def view(self, kv: BlockKV, positions: Tensor, batch: ScheduleBatch, translator: Any) -> BlockKV:
        """Return the block in the drafter's pool, with lengths that count from its oldest visible token.

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
        """Claim the ring for a request; return whether it already owned it.

        A row's generation counts its allocations, so a retracted request that gets its row back is a new owner. The
        next turn of a streaming session keeps row and generation but may begin before the ring's end: another ``rid``.
        """
        owner = int(self._generation[row]), rid
        owned = self._owners[row] == owner
        self._owners[row] = owner
        return owned

    def _first_read(self, oldest: Tensor, committed: Tensor) -> Tensor:
        # First position that a block after ``committed`` tokens reads, [bs], on the host or the device.
        return torch.maximum(oldest, self._page_start(committed - self._window.tokens))

    def _page_start(self, position: Any) -> Any:
        return position - position % self._window.page

    def _slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        return self._first + (rows - 1) * self.size + positions % self.size


def charge_rings(
    original: Callable[..., Any], configurator: Any, budget_bytes: int, *, cap_tokens: int | None = None
) -> Any:
    """Hook around ``KVCacheConfigurator.config_from_budget``.

    SGLang sizes the target's K/V pool so that a drafter's pool with as many slots fits as well. Rings have a fixed
    size: subtract them from the budget once; then a token costs the target's bytes only.

    Args:
        configurator: SGLang's ``KVCacheConfigurator`` of the target.
        budget_bytes: memory of this rank for the K/V of target and drafter.
        cap_tokens: the pool's present size. SGLang passes it when it resizes the pool after graph capture
            (``SGLANG_ENABLE_POST_CAPTURE_KV_SIZING``) to the free memory; the rings are allocated by then.
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
    """Hook after ``Req._compute_max_prefix_len``: end a prefix hit one window before the prompt does.

    The prefix cache keeps the target's K/V only. The drafter's K/V come from the target's hidden states, which are not
    kept, and lie in the ring of the request that computed them. So the prefill recomputes the last window, at most, and
    the first block sees its whole window.

    Args:
        longest: SGLang's bound, tokens.
        input_len: length of the request so far, tokens.
    """
    plan = serving.plan
    return longest if plan is None or plan.window is None else max(0, min(longest, input_len - plan.window.tokens))
