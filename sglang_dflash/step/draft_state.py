"""A batch between two decode steps: its anchors, and its reservation of KV slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.mem_cache.allocation import alloc_for_spec_decode
from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode, page_aligned_decode_alloc_lens
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType
from sglang.srt.utils.common import async_h2d, ceil_align
from torch import Tensor

from sglang_dflash.upstream.hooks import Hooks

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch


class DraftState(SpecInput):
    """SGLang's ``batch.spec_info`` between steps.

    With overlap scheduling, a filter or merge of the batch changes ``future_indices`` only, rows of the scheduler's
    relay buffers. The scheduler fills ``bonus_tokens`` (int64 [bs], anchors of the next block) and ``batch.seq_lens``.

    Args:
        in_flight: width of the step that returned this state; with overlap, ``committed_cpu`` lacks its tokens.

    Attributes:
        committed_cpu: committed lengths on the host, one step late with overlap.
        reserved_lens_cpu: int32 [bs] on the host, lengths with KV slots; ``reserved_tokens`` is their sum.
        slot_limits: int64 [bs], lengths with KV slots, if the pool is short; later positions use the padding slot.
        free_positions: how many positions of the next block have KV slots; None: all.
    """

    # unused by DFLASH
    topk_p = topk_index = hidden_states = None
    num_tokens_per_req = num_tokens_for_logprob_per_req = 1

    def __init__(
        self, bonus_tokens: Tensor, new_seq_lens: Tensor, in_flight: int, future_indices: Tensor | None = None
    ) -> None:
        super().__init__(SpecInputType.DFLASH_DRAFT)
        self.bonus_tokens, self.new_seq_lens, self.future_indices = bonus_tokens, new_seq_lens, future_indices
        self.in_flight, self.reserved_tokens = in_flight, 0
        self.committed_cpu: list[int] = []
        self.reserved_lens_cpu: Tensor | None = None
        self.slot_limits: Tensor | None = None
        self.free_positions: int | None = None

    def prepare_for_decode(self, batch: ScheduleBatch) -> None:
        """Reserve KV slots for the next step; runs on the scheduler's stream.

        Reserve a full block after the committed length, which may be one step old; if slots are missing, two, so that
        plain steps allocate rarely.
        """
        if batch.batch_size() == 0:
            return
        batch.maybe_evict_swa()
        self.committed_cpu = [req.kv.kv_committed_len for req in batch.reqs]
        page_size = batch.token_to_kv_pool_allocator.page_size
        blocks = get_alloc_reserve_per_decode()
        lengths = partial(page_aligned_decode_alloc_lens, batch.reqs, page_size=page_size)
        current, reserved, missing = lengths(reserve=blocks // 2 + self.in_flight)
        if missing:  # allocate for the step after next too
            current, reserved, missing = lengths(reserve=blocks)
        # Near the context limit two blocks can exceed the slot table: clamp. Every token that can still be committed
        # fits.
        columns = batch.req_to_token_pool.req_to_token.shape[1]
        if missing:
            reserved = [min(length, columns) for length in reserved]
        if missing and not _fits(batch, _whole_pages(current, reserved, page_size)):
            current, reserved = self._reserve_less(batch, blocks, page_size)
        self.reserved_tokens = sum(reserved)
        on_host = _host_tensor([current, reserved], np.int32)
        self.reserved_lens_cpu = on_host[1]
        if missing := self.reserved_tokens - sum(current):
            lens = async_h2d([current, reserved], dtype=torch.int32, device=batch.device)
            alloc_for_spec_decode(
                batch.tree_cache,
                batch.req_to_token_pool,
                reqs=batch.reqs,
                req_pool_indices=batch.req_pool_indices,
                cur_kv_lens=lens[0],
                cur_kv_lens_cpu=on_host[0],
                nxt_kv_lens=lens[1],
                nxt_kv_lens_cpu=self.reserved_lens_cpu,
                num_needed_tokens=missing,
                batch=batch,
            )
        if self.slot_limits is not None:  # a block may end past its slots
            longest = [length + self.unseen_tokens(batch) + blocks // 2 for length in self.committed_cpu]
            self.reserved_lens_cpu = torch.maximum(self.reserved_lens_cpu, _host_tensor(longest, np.int32))
            self.reserved_tokens = int(self.reserved_lens_cpu.sum())
        for req in batch.reqs:
            req.decode_batch_idx += 1
        batch.seq_lens_cpu = _host_tensor(self.committed_cpu, np.int64)
        batch.seq_lens_sum = sum(self.committed_cpu)

    def _reserve_less(self, batch: ScheduleBatch, blocks: int, page_size: int) -> tuple[list[int], list[int]]:
        unseen = self.unseen_tokens(batch)
        for tokens_ahead in (blocks, *range(blocks // 2 + unseen, unseen, -1)):
            current, reserved = lens_to_the_end(batch.reqs, tokens_ahead, page_size)
            if _fits(batch, _whole_pages(current, reserved, page_size)):
                break
        self.slot_limits = async_h2d(reserved, dtype=torch.int64, device=batch.device)
        ends = [_end(req) for req in batch.reqs]
        lens = zip(self.committed_cpu, reserved, ends, strict=True)
        short = [length - committed - unseen for committed, length, end in lens if length < end]
        self.free_positions = min(short, default=None)
        return current, reserved

    def unseen_tokens(self, batch: ScheduleBatch) -> int:
        return self.in_flight if batch.enable_overlap else 0  # tokens that ``committed_cpu`` may lack

    def filter_batch(self, new_indices: Tensor, new_indices_cpu: list[int] | None = None) -> None:
        for name in self._following():
            setattr(self, name, getattr(self, name)[new_indices])

    def merge_batch(self, other: DraftState) -> None:
        for name in self._following():
            setattr(self, name, torch.cat((getattr(self, name), getattr(other, name))))
        self.in_flight = max(self.in_flight, other.in_flight)

    def _following(self) -> tuple[str, ...]:
        return ("bonus_tokens", "new_seq_lens") if self.future_indices is None else ("future_indices",)


def tokens_required(_: Callable[..., int], batch: ScheduleBatch, requests: list[Req], page_size: int) -> int:
    """Hook around ``ScheduleBatch._new_tokens_required_next_decode_spec_v2``: return the slots that requests need.

    The last request needs one position, as in plain decoding.
    """
    tokens_ahead = get_alloc_reserve_per_decode() if len(requests) > 1 else batch.spec_info.unseen_tokens(batch) + 1
    return _whole_pages(*lens_to_the_end(requests, tokens_ahead, page_size), page_size)


def lens_to_the_end(reqs: Sequence[Req], tokens_ahead: int, page_size: int) -> tuple[list[int], list[int]]:
    """Return the lengths with KV slots, now and with ``tokens_ahead`` more positions, clamped to the requests' ends."""
    current, reserved, _ = page_aligned_decode_alloc_lens(reqs, reserve=tokens_ahead, page_size=page_size)
    ends = [ceil_align(_end(req), page_size) for req in reqs]
    lens = zip(current, reserved, ends, strict=True)
    return current, [max(now, min(wanted, end)) for now, wanted, end in lens]


def _whole_pages(current: list[int], reserved: list[int], page_size: int) -> int:
    before, after = (sum(ceil_align(length, page_size) for length in lens) for lens in (current, reserved))
    return after - before


def _end(req: Req) -> int:
    # even with max_new_tokens 0, one step may already be running
    return len(req.origin_input_ids) + max(1, req.sampling_params.max_new_tokens)


def _fits(batch: ScheduleBatch, tokens: int) -> bool:
    fits: bool = batch.token_to_kv_pool_allocator.check_decode_capacity(
        num_tokens=tokens, tree_cache=batch.tree_cache, requests=batch.reqs, spec_algorithm=batch.spec_algorithm
    )
    return fits


def _host_tensor(values: Any, dtype: Any) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=dtype))  # a third of the time of torch.tensor


HOOKS = Hooks(
    around={"managers.schedule_batch.ScheduleBatch._new_tokens_required_next_decode_spec_v2": tokens_required}
)
